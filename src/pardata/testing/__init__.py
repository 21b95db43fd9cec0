"""Your own tests on several ranks.

``run(fn, world_size=3)`` returns what `fn` returned on each rank. A failure on one comes back with
its rank and traceback, and no rank hangs. ``assert_same_at_every_world_size(train)`` raises an
error with the first step and tensor in which training differs between world sizes, and by how much.
"""

from pardata.testing._run import assert_same_at_every_world_size, run

__all__ = ["assert_same_at_every_world_size", "run"]

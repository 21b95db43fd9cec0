"""Say what `init` found: one line of each rank."""

import os

from pardata import all_reduce_sum, init

with init() as world:
    total = all_reduce_sum(world.rank + 1)
    text = (
        f"rank {world.rank}/{world.size} local {world.local_rank}/{world.local_size} "
        f"node {world.node_rank}/{world.num_nodes} {world.launcher} sum {total:g}\n"
    )
    os.write(1, text.encode())  # in one piece: lines of several ranks must not mix

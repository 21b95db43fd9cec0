"""Found in place of the ``_dataset.py`` of another distribution: see `pardata._distribution`."""

from pardata._distribution import require_alone

require_alone()

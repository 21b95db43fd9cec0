"""A warning where gradients of uneven shares are averaged as if they were even."""

import torch.distributed as dist

from pardata.ranks._logger import get_logger
from pardata.ranks._process import process

_log = get_logger(__name__)


def warn_of_uneven_shares() -> None:
    """Say once that a training forward outside of `backward` has shares that are not weighted."""
    if not process.uneven_batch:
        return
    batch_size, process.uneven_batch = process.uneven_batch, 0
    ranks = dist.get_world_size()
    text = (
        f"`batch_size` {batch_size} leaves {ranks} ranks shares that differ by one sample, and a "
        f"loss.backward() takes the plain mean of their gradients: call `pardata.backward`, which "
        f"weights them, choose a multiple of {ranks}, or weight the loss yourself"
    )
    _log.warning(text, ranks=[0], once=True)

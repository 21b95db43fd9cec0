"""A warning if gradients of uneven shares are averaged as if they were even."""

import torch.distributed as dist

from pardata.environment._logger import get_logger

_log = get_logger(__name__)


class UnevenShares:
    """The batch size of a training loader whose shares are uneven; 0 if nobody is to be warned."""

    batch_size = 0

    def warn(self) -> None:
        """Say once that a training forward outside of `backward` does not weight them."""
        if not self.batch_size:
            return
        batch_size, self.batch_size = self.batch_size, 0
        ranks = dist.get_world_size()
        text = (
            f"`batch_size` {batch_size} leaves {ranks} ranks shares that differ by one sample, and "
            f"a loss.backward() takes the plain mean of their gradients: call `pardata.backward`, "
            f"which weights them, choose a multiple of {ranks}, or weight the loss yourself"
        )
        _log.warning(text, ranks=[0], once=True)


uneven_shares = UnevenShares()

"""Buffers, as batch norm's statistics, made equal on all ranks under "fsdp"."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d


class EqualBuffers:
    """A forward hook: after a training forward all ranks have rank 0's buffers, as under "ddp"."""

    def __init__(self) -> None:
        self._waits = False

    def __call__(self, module: nn.Module, _args: object, _output: object) -> None:
        """Broadcast the buffers."""
        if module.training and torch.is_grad_enabled() and not self._waits:
            buffers = [buffer.data for buffer in module.buffers()]
            if buffers:  # as DDP does it: in one message, which torch has no public name for
                dist._broadcast_coalesced(  # noqa: SLF001
                    distributed_c10d._get_default_group(),  # noqa: SLF001
                    buffers,
                    250 * 2**20,
                    0,
                )

    @classmethod
    def of(cls, module: nn.Module) -> "EqualBuffers | None":
        """Return that of this module, if it has one."""
        hooks = module._forward_hooks.values()  # noqa: SLF001  # torch has no public name
        return next((hook for hook in hooks if isinstance(hook, cls)), None)

    @contextmanager
    def averaged(self, module: nn.Module, share: Callable[[], float]) -> Iterator[None]:
        """Let the forwards of a block be, and take the mean of the buffers after it. Collective.

        Args:
            module: that has this hook.
            share: returns how much of the mean is this rank's.
        """
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
        if module.training:
            average([buffer.data for buffer in module.buffers()], share())


def average(buffers: list[Tensor], share: float) -> None:
    """Set buffers to their mean, weighted by each rank's `share`; whole numbers to rank 0's.

    Collective, in one message.
    """
    if not buffers:
        return
    weights = [share if b.is_floating_point() else float(dist.get_rank() == 0) for b in buffers]
    # 0 times NaN is NaN: what has no share is left out. Whole numbers are exact below 2**53.
    parts = [
        buffer.double().reshape(-1) * weight
        if weight
        else buffer.new_zeros(buffer.numel(), dtype=torch.float64)
        for buffer, weight in zip(buffers, weights, strict=True)
    ]
    flat = torch.cat(parts)
    dist.all_reduce(flat)
    for buffer, mean in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view(buffer.shape))

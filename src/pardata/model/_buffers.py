"""Buffers, as batch norm's statistics, made equal on all ranks under "fsdp"."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pardata.model._uneven_shares import warn_of_uneven_shares


class EqualBuffers:
    """A forward hook: after a training forward all ranks have rank 0's buffers, as under "ddp"."""

    waits = False

    def __call__(self, module: nn.Module, _args: object, _output: object) -> None:
        """Broadcast the buffers."""
        if module.training and torch.is_grad_enabled() and not self.waits:
            warn_of_uneven_shares()
            broadcast(module.buffers())


@contextmanager
def averaged_buffers(
    module: nn.Module, counts: Callable[[], tuple[int, float | Tensor]]
) -> Iterator[None]:
    """Let the forwards of a block be, and take the mean of the buffers after it. Collective.

    Args:
        module: does nothing for one that has not the hook `EqualBuffers`.
        counts: returns how much this rank's buffers count, and those of all ranks.
    """
    hooks = module._forward_hooks.values()  # noqa: SLF001  # torch has no public name
    equal = [hook for hook in hooks if isinstance(hook, EqualBuffers)]
    for hook in equal:
        hook.waits = True
    try:
        yield
    finally:
        for hook in equal:
            hook.waits = False
    if equal and module.training:
        average(real_buffers(module).values(), *counts())


def broadcast(tensors: Iterable[Tensor], group: Any = None) -> None:
    """Set tensors to rank 0's. Collective, in one message for many, as DDP does it."""
    # As bytes, for gloo does not know all dtypes; .data, for autograd may have saved a buffer.
    held = [(tensor.data, tensor.data.contiguous()) for tensor in tensors]
    if held:
        sent = [whole.view(-1).view(torch.uint8) for _, whole in held]
        group = group or dist.group.WORLD
        dist._broadcast_coalesced(group, sent, 250 * 2**20, 0)  # noqa: SLF001  # likewise
    for tensor, whole in held:
        if not tensor.is_contiguous():
            tensor.copy_(whole)


def average(buffers: Collection[Tensor], count: int, total: float | Tensor) -> None:
    """Set buffers to their mean, weighted by each rank's `count`; whole numbers to rank 0's.

    Collective, in one message of each of the two kinds.
    """
    floating = [buffer for buffer in buffers if buffer.is_floating_point()]
    broadcast(buffer for buffer in buffers if not buffer.is_floating_point())
    if not floating:
        return
    # 0 times NaN is NaN: what does not count is left out.
    flat = torch.cat([buffer.double().reshape(-1) for buffer in floating])
    flat = flat * count if count else torch.zeros_like(flat)
    dist.all_reduce(flat)
    flat /= total
    for buffer, mean in zip(floating, flat.split([b.numel() for b in floating]), strict=True):
        buffer.copy_(mean.view(buffer.shape))


@contextmanager
def kept_buffers(module: nn.Module, but_of: Collection[nn.Module] = ()) -> Iterator[None]:
    """Put the buffers back, after the block, to what they were: the same tensors, their values.

    All but those of the parts `but_of`.
    """
    parts = [part for part in module.modules() if part not in but_of]
    held = [(part._buffers, dict(part._buffers)) for part in parts]  # noqa: SLF001  # as above
    values = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers(recurse=False)]
    try:
        yield
    finally:
        for own, buffers in held:
            own.clear()
            own.update(buffers)
        for buffer, value in values:
            buffer.data.copy_(value)


def real_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the memory of the buffers; of a complex number, which no backend takes, as two."""
    return {
        name: torch.view_as_real(b.data) if b.is_complex() else b.data
        for name, b in module.named_buffers()
    }

"""Buffers, as batch norm's statistics, made equal on all ranks."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def broadcast(tensors: Iterable[Tensor], group: Any = None) -> None:
    """Set tensors to rank 0's. Collective, in one message for many, as DDP does it."""
    # As bytes, for gloo does not know all dtypes; .data, for autograd may have saved a buffer.
    held = [(tensor.data, tensor.data.contiguous()) for tensor in tensors]
    if held:
        sent = [whole.view(-1).view(torch.uint8) for _, whole in held]
        group = group or dist.group.WORLD
        dist._broadcast_coalesced(group, sent, 250 * 2**20, 0)  # noqa: SLF001  # torch has no public name
    for tensor, whole in held:
        if not tensor.is_contiguous():
            tensor.copy_(whole)


def after_backward(
    outputs: Iterable[Tensor], action: Callable[[], None], *, otherwise: bool = True
) -> None:
    """Run `action` at the end of the first backward through any of the outputs of a forward.

    If none of them can have a backward, at once, or not at all.
    """
    waiting = [action]

    def begin(_gradient: Tensor) -> None:
        if waiting:
            at_end_of_backward(waiting.pop())

    ends = [tensor for tensor in outputs if tensor.requires_grad]
    for tensor in ends:
        tensor.register_hook(begin)
    if not ends and otherwise:
        action()


def at_end_of_backward(action: Callable[[], None]) -> None:
    """Run `action` when the backward that runs now has ended, after what was queued before."""
    engine = torch.autograd.Variable._execution_engine  # noqa: SLF001  # as DDP itself does
    engine.queue_callback(action)


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


def real_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the memory of the buffers; of a complex number, which no backend takes, as two."""
    return {
        name: torch.view_as_real(b.data) if b.is_complex() else b.data
        for name, b in module.named_buffers()
    }

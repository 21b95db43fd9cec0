"""Broadcasts and averages buffers, for example the statistics of batch norm."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pardata.environment._device import broadcast_together


def broadcast_coalesced(tensors: Iterable[Tensor], group: Any = None) -> None:
    """Set tensors to the values of rank 0. Collective, coalesced as by DDP."""
    # As bytes, because gloo lacks some dtypes. By .data, because autograd may have saved a buffer.
    held = [(tensor.data, tensor.data.contiguous()) for tensor in tensors]
    if held:
        broadcast_together([contiguous.view(-1).view(torch.uint8) for _, contiguous in held], group)
    for tensor, contiguous in held:
        if not tensor.is_contiguous():
            tensor.copy_(contiguous)


def average_buffers(buffers: Collection[Tensor], count: float, total: float | Tensor) -> None:
    """Set buffers to their mean, weighted by each rank's `count`, and integer buffers to rank 0's.

    Collective: one all-reduce and one broadcast.
    """
    floating = [buffer for buffer in buffers if buffer.is_floating_point()]
    broadcast_coalesced(buffer for buffer in buffers if not buffer.is_floating_point())
    if not floating:
        return
    # 0 times NaN is NaN, so a rank that counts 0 contributes zeros.
    flat = torch.cat([buffer.double().reshape(-1) for buffer in floating])
    flat = flat * count if count else torch.zeros_like(flat)
    dist.all_reduce(flat)
    flat /= total
    for buffer, mean in zip(floating, flat.split([b.numel() for b in floating]), strict=True):
        buffer.copy_(mean.view(buffer.shape))


def real_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers by name, detached, complex ones viewed as real, as backends require."""
    return {
        name: torch.view_as_real(b.data) if b.is_complex() else b.data
        for name, b in module.named_buffers()
    }

"""The gradients and buffers that a step changes: moved aside, restored, broadcast.

Does not copy gradients unless new ones would use their memory.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from pardata.environment._device import broadcast_together
from pardata.model._torch_internals import direct_tensors

_Gradient = tuple[nn.Parameter, Tensor]


def broadcast_coalesced(tensors: Iterable[Tensor], group: Any = None) -> None:
    """Set tensors to the values of rank 0. Collective, coalesced as by DDP."""
    # As bytes, because gloo lacks some dtypes. By .data, because autograd may have saved a buffer.
    held = [(tensor.data, tensor.data.contiguous()) for tensor in tensors]
    if held:
        broadcast_together([contiguous.view(-1).view(torch.uint8) for _, contiguous in held], group)
    for tensor, contiguous in held:
        if not tensor.is_contiguous():
            tensor.copy_(contiguous)


def real_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers by name, detached, complex ones viewed as real, as backends require."""
    return {
        name: torch.view_as_real(b.data) if b.is_complex() else b.data
        for name, b in module.named_buffers()
    }


class StashedGradients(AbstractContextManager["StashedGradients"]):
    """Context manager: moves existing ``.grad`` aside, and adds it back at the end.

    Existing gradients are reduced already, and must not be reduced again. After an error it
    restores them.

    Args:
        parameters: the parameters whose gradients are moved.
        shares_memory: whether new gradients use the memory of the old ones.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, shares_memory: bool = False) -> None:
        self._params, self._before = list(parameters), list[_Gradient]()
        for parameter in self._params:
            if (gradient := parameter.grad) is not None:
                self._before.append((parameter, gradient.clone() if shares_memory else gradient))
                parameter.grad = None

    def __exit__(self, kind: object, *_rest: object) -> None:
        if kind is not None:
            for parameter in self._params:
                parameter.grad = None
            for parameter, gradient in self._before:
                parameter.grad = gradient
        elif self._before:  # entering no_grad() would take 1 % of a small model's step
            _add(self._before)


@torch.no_grad()
def _add(before: list[_Gradient]) -> None:
    for parameter, old in before:
        new = parameter.grad
        if new is None:
            parameter.grad = old
        elif old.is_sparse and not new.is_sparse:
            parameter.grad = new + old
        else:  # in place, as PyTorch does, so that references to it see the sum
            parameter.grad = old.add_(new)


class BufferSnapshot(AbstractContextManager["BufferSnapshot"]):
    """Context manager: restores buffers at exit, the same tensors with the same values.

    Args:
        modules: the modules whose buffers it restores.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._held = [(b, dict(b)) for module in modules if (b := direct_tensors(module)[1])]
        tensors = [b for _, before in self._held for b in before.values() if b is not None]
        # .data, because autograd may have saved a buffer.
        self._values = [(buffer.data, buffer.data.clone()) for buffer in tensors]

    def __exit__(self, kind: object, *_rest: object) -> None:
        for buffers, before in self._held:
            buffers.clear()
            buffers.update(before)
        # After an error on a GPU each kernel raises it again: keep the block's error.
        with suppress(*[RuntimeError] * (kind is not None)):
            for data, value in self._values:
                data.copy_(value)

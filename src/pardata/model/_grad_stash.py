"""Gradients that a step finds and leaves after an error; buffers that a block puts back."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress

import torch
from torch import Tensor, nn

from pardata.model._torch_internals import direct_tensors

_Gradient = tuple[nn.Parameter, Tensor]


class StashedGradients(AbstractContextManager["StashedGradients"]):
    """A block that finds no gradients, because none must be reduced again, and adds its own.

    If it ends in an error, it leaves those that were there.

    Args:
        parameters: whose gradients.
        shares_memory: whether new gradients come in the memory of the old ones.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, shares_memory: bool = False) -> None:
        self._parameters, self._before = list(parameters), list[_Gradient]()
        for parameter in self._parameters:
            if (gradient := parameter.grad) is not None:
                self._before.append((parameter, gradient.clone() if shares_memory else gradient))
                parameter.grad = None

    def __exit__(self, kind: object, *_rest: object) -> None:
        if kind is not None:
            for parameter in self._parameters:
                parameter.grad = None
            for parameter, gradient in self._before:
                parameter.grad = gradient
        elif self._before:  # to enter no_grad() takes a hundredth of a small model's step
            _add(self._before)


@torch.no_grad()
def _add(before: list[_Gradient]) -> None:
    for parameter, old in before:
        new = parameter.grad
        if new is None:
            parameter.grad = old
        elif old.is_sparse and not new.is_sparse:
            parameter.grad = new + old
        else:  # in place, as PyTorch's: who holds the tensor sees the sum
            parameter.grad = old.add_(new)


class BufferSnapshot(AbstractContextManager["BufferSnapshot"]):
    """A block after which buffers are what they were, the same tensors with their values.

    Args:
        modules: the modules whose buffers.
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
        # After an error on a GPU each kernel raises it anew: the error of the block stays.
        with suppress(*[RuntimeError] * (kind is not None)):
            for data, value in self._values:
                data.copy_(value)

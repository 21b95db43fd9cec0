"""Gradients and buffers as a step finds them, and leaves them if it ends in an error."""

from collections.abc import Iterable
from operator import is_
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

# ruff: noqa: SLF001  # torch has no public names for what a module holds, and its methods take long

_LARGE = 2**16  # elements
_Gradient = tuple[nn.Parameter, Tensor]


def walked(module: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """Return the parts of a module and their parameters: in a fourth of the time of its methods."""
    parts, seen = [module], {module}
    for part in parts:
        for child in part._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                parts.append(child)
    return parts, [p for part in parts for p in part._parameters.values() if p is not None]


def name_of(parameter: Tensor, named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the name that a parameter has among those that are `named`."""
    return next((name for name, one in named if one is parameter), "a former parameter")


class GradientsAside:
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

    def trained(self) -> list[nn.Parameter]:
        """Return which have a gradient now."""
        return [parameter for parameter in self._parameters if parameter.grad is not None]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_rest: object) -> None:
        if kind is not None:
            self.undo()
        elif self._before:
            _add(self._before)

    def undo(self) -> None:
        """Put the gradients back that were there, and no others."""
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, gradient in self._before:
            parameter.grad = gradient


class AsFound(GradientsAside):
    """A block of `GradientsAside` for a module, after which an error leaves its buffers, too.

    They are what they were before, except a large buffer that changes for the first time.
    """

    def __init__(self, module: nn.Module, *, shares_memory: bool = False) -> None:
        parts, parameters = walked(module)
        super().__init__(parameters, shares_memory=shares_memory)
        holders = [part for part in parts if part._buffers]
        self._buffers = KeptBuffers(holders, after_errors_only=True) if holders else None

    def __exit__(self, kind: object, *_rest: object) -> None:
        if self._buffers is not None:
            self._buffers.__exit__(kind)
        super().__exit__(kind)


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


class KeptBuffers:
    """A block after which buffers are what they were, the same tensors with their values.

    Args:
        parts: the modules whose buffers.
        after_errors_only: leave them alone after a block that ends well.
    """

    def __init__(self, parts: Iterable[nn.Module], *, after_errors_only: bool = False) -> None:
        self._after_errors_only = after_errors_only
        self._held = [(part, dict(own)) for part in parts if (own := part._buffers)]
        tensors = [b for _, own in self._held for b in own.values() if b is not None]
        if after_errors_only:
            tensors = list(filter(_may_change, tensors))
        known = _spare.pop(self._held[0][0], None) if tensors else None
        self._copies = known if known and known.are_of(tensors) else _Copies(tensors)
        self._copies.take()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_rest: object) -> None:
        if kind is not None or not self._after_errors_only:
            self.put_back()
        if self._held:
            _spare[self._held[0][0]] = self._copies

    def put_back(self) -> None:
        """Set the buffers to what they were."""
        for part, own in self._held:
            part._buffers.clear()
            part._buffers.update(own)
        self._copies.put_back()


def _may_change(buffer: Tensor) -> bool:
    """Return whether a step may change it: a large one if it has been changed since it was seen.

    To copy the others (masks, tables of positions) at each step would take longer than the step.
    Batch norm changes its small ones without a new version.
    """
    if buffer.numel() <= _LARGE or buffer.is_inference():
        return True
    return bool(_seen.setdefault(buffer, buffer._version) != buffer._version)


class _Copies:
    """Copies of buffers, in memory that serves step after step: new memory takes longer to get."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers, alike = buffers, dict[object, list[Tensor]]()
        for buffer in buffers:  # a GPU copies those of one dtype by one kernel
            kind = buffer.device, None if buffer.is_cpu else buffer.dtype
            # .data, because autograd may have saved a buffer.
            alike.setdefault(kind, []).append(buffer.data)
        self._groups = [(group, list(map(torch.empty_like, group))) for group in alike.values()]

    def are_of(self, buffers: list[Tensor]) -> bool:
        return len(buffers) == len(self._buffers) and all(map(is_, buffers, self._buffers))

    def take(self) -> None:
        for group, values in self._groups:
            torch._foreach_copy_(values, group)

    def put_back(self) -> None:
        for group, values in self._groups:
            torch._foreach_copy_(group, values)


_spare = WeakKeyDictionary[nn.Module, _Copies]()  # by the first module with buffers
_seen = WeakTensorKeyDictionary()  # the version of a large buffer at the first step

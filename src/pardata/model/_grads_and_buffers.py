"""The gradients and buffers that a step changes: moved aside, restored, broadcast, looked at.

Does not copy gradients unless new ones would use their memory.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from pardata.environment._device import broadcast_together
from pardata.model._torch_internals import BatchNorm, direct_tensors, write_count
from pardata.model._unwrap import unwrap

_Gradient = tuple[nn.Parameter, Tensor]
# Attributes: of a model's layer, the buffers below; of a module, that its forward may change them.
_UNOWNED, _ALLOWED, _TORCH = "_pardata_unowned_buffers", "forward_updates_buffers", "torch.nn."
_MARK = "_pardata_gradients"  # an attribute of a model: how many optimizer steps preceded them


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
    named = module.named_buffers()
    return {n: torch.view_as_real(b.data) if b.is_complex() else b.data for n, b in named}


@cache
def _optimizer_steps() -> list[int]:
    """Return how many steps the optimizers of this process have made since the first call."""
    steps = [0]

    def count(*_: object) -> None:
        steps[0] += 1

    register_optimizer_step_post_hook(count)
    return steps


def mark_gradients(model: nn.Module) -> None:
    """Record that a step has made gradients."""
    vars(model)[_MARK] = _optimizer_steps()[0]


def has_unused_gradients(model: nn.Module) -> bool:
    """Whether a step has made gradients, and no optimizer has made a step since."""
    made = vars(model).get(_MARK) == _optimizer_steps()[0]
    return made and any(parameter.grad is not None for parameter in model.parameters())


class BufferWrites:
    """Finds a write to a floating-point buffer that no norm owns.

    It leaves out PyTorch's own modules, and modules with ``forward_updates_buffers = True``.

    Args:
        layer: the layer that belongs to the model's strategy.
    """

    def __init__(self, layer: nn.Module) -> None:
        held = vars(layer)
        if _UNOWNED not in held:  # a search takes 5 % of a small model's step
            held[_UNOWNED] = [
                (f"{path}.{key}".lstrip("."), direct_tensors(part)[1], key)
                for path, part in unwrap(layer).named_modules()
                if not (isinstance(part, BatchNorm) or type(part).__module__.startswith(_TORCH))
                for key, buffer in part.named_buffers(recurse=False)
                if buffer.is_floating_point() and not getattr(part, _ALLOWED, False)
            ]
        self._held: list[tuple[str, dict[str, Tensor], str]] = held[_UNOWNED]
        before = [buffers.get(key) for _, buffers, key in self._held]
        self._before = [(buffer, write_count(buffer)) for buffer in before]

    def find(self) -> str | None:
        """Return the name of a buffer that was written since, or exchanged."""
        for (name, buffers, key), (buffer, writes) in zip(self._held, self._before, strict=True):
            if buffers.get(key) is not buffer or write_count(buffer) != writes:
                return name
        return None


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

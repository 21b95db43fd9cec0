"""Buckets: parameters whose gradients are summed in the fixed tree, and sent, together."""

from collections.abc import Iterable
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch import Tensor, nn

from pardata.strategies.exact._tree_all_reduce import IDENTITY, TreeAllReduce, TreeLayout, TreeStack

_MOST, _MOST_OF_GPU = 2**20, 2**22  # elements of a bucket: 4 MiB in float32 on a CPU, else 16

# The gradient of each parameter of a bucket, of its shape; None if it was not used.
_Gradients: TypeAlias = list[Tensor | None]


class Bucket:
    """Parameters of one dtype, whose gradients are summed and sent together.

    Sums are in float32 or float64, complex gradients viewed as real. A bucket is reused in each
    step.

    Args:
        parameters: in the order in which the backward computes gradients.

    Attributes:
        missing: the parameters without a gradient in the current backward so far.
        is_added: whether the gradients of the current microbatch were added.
        used: for each parameter, whether it had a gradient in this step.
        sum: the all-reduce of the bucket, after `send`.
    """

    sum: TreeAllReduce

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        kind = parameters[0].dtype
        self._is_complex = kind.is_complex
        real = kind.to_real() if kind.is_complex else kind
        self._dtype = real if real == torch.float64 else torch.float32
        self._places: list[tuple[slice, torch.Size, tuple[int, ...]]] = []
        self._length = 0
        for parameter in parameters:
            # In the layout of the parameter, as with PyTorch, because fused optimizers require it.
            layout = torch.empty_like(parameter, dtype=kind, device="meta")
            layout = torch.view_as_real(layout) if kind.is_complex else layout
            end = self._length + layout.numel()
            self._places.append((slice(self._length, end), layout.shape, layout.stride()))
            self._length = end

    def begin_step(self, layout: TreeLayout) -> None:
        """Reset the sums for a new step."""
        self._layout = layout
        self._stack = TreeStack[_Gradients](layout.count, _added)
        self.used = [False] * len(self.parameters)

    def begin(self) -> None:
        """Reset the state for a new microbatch."""
        self.missing = set(self.parameters)
        self.is_added = False

    def take(self, number: int, *, counts: bool) -> None:
        """Add the current ``.grad`` of the parameters as leaf `number` of the tree; clear it."""
        gradients = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self.is_added = True
        leaf: _Gradients | None = None
        if counts and any(g is not None for g in gradients):
            leaf = [None if g is None else self._real(g) for g in gradients]
            self.used = [u or g is not None for u, g in zip(self.used, gradients, strict=True)]
        self._stack.push((number, number + 1), leaf)

    def _real(self, gradient: Tensor) -> Tensor:
        gradient = gradient.detach()
        return (torch.view_as_real(gradient) if self._is_complex else gradient).to(self._dtype)

    def send(self, payload: Tensor | None = None) -> None:
        """Start the all-reduce of this rank's subtree sums, followed by `payload`. Collective."""
        behind = self._length + (0 if payload is None else len(payload))
        rows = self._layout.rows(behind, self._dtype, self.parameters[0].device)
        # A failed rank has other subtrees, but no rank uses the result then.
        left = [gradients for _, gradients in self._stack.subtrees]
        for row, gradients in zip_longest(rows, left[: len(rows)]):
            both = list(zip(self._parts(row), gradients or [None], strict=False))
            used = [(part, gradient) for part, gradient in both if gradient is not None]
            if len(used) < len(self.parameters):
                row.fill_(IDENTITY)
            if used:
                parts, values = map(list, zip(*used, strict=True))
                torch._foreach_copy_(parts, values)  # as optimizers do
        rows[:, self._length :] = IDENTITY
        if payload is not None:
            rows[0, self._length : behind] = payload
        self._stack.subtrees.clear()
        self.sum = TreeAllReduce(self._layout, rows)

    def _parts(self, row: Tensor) -> list[Tensor]:
        """Return views of `row`, of shape (length,), in the shape and strides of each parameter."""
        return [row[where].as_strided(shape, stride) for where, shape, stride in self._places]

    def finish(self) -> Tensor:
        """Wait for the sums, and return those of the payload."""
        self._sums = self.sum.result()
        del self.sum
        return self._sums[self._length :]

    def set_gradients(self, used: Iterable[bool]) -> None:
        """Set ``.grad`` of the parameters that are used to their sums."""
        parts = self._parts(self._sums)
        del self._sums  # the gradients share its memory
        for parameter, part, is_used in zip(self.parameters, parts, used, strict=True):
            if is_used:
                gradient = torch.view_as_complex(part) if self._is_complex else part
                parameter.grad = gradient.to(parameter.dtype)


def _added(left: _Gradients, right: _Gradients) -> _Gradients:
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])  # as optimizers do
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def buckets_of(parameters: Iterable[nn.Parameter]) -> list[Bucket]:
    """Divide parameters into buckets of one dtype, in reverse order, as gradients are computed."""
    filled: list[list[nn.Parameter]] = []
    last: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in reversed(list(parameters)):
        bucket, most = last.get(parameter.dtype), _MOST if parameter.is_cpu else _MOST_OF_GPU
        if bucket is None or sum(p.numel() for p in [*bucket, parameter]) > most:
            bucket = last[parameter.dtype] = []
            filled.append(bucket)
        bucket.append(parameter)
    return list(map(Bucket, filled))

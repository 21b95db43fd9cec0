"""Parameters whose gradients are added in the fixed tree, and sent, together."""

from collections.abc import Iterable
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch import Tensor, nn

from pardata.strategies.exact._tree_all_reduce import IDENTITY, TreeAllReduce, TreeLayout, TreeStack

_MOST, _MOST_OF_GPU = 2**20, 2**22  # numbers that are sent together: 4 MiB over gloo, else 16

# A gradient for each parameter of a bucket; None if it was not used.
_Gradients: TypeAlias = list[Tensor | None]


class Bucket:
    """Parameters of one dtype, whose gradients are added and sent together.

    In float32 at least, a complex number as two. Lives from step to step.

    Args:
        parameters: in the order in which gradients come.

    Attributes:
        missing: those that have got no gradient from the backward that runs.
        is_added: whether the gradients of that were added.
        used: which of the parameters had a gradient in this step.
        sum: of what was sent.
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
            # In its own layout, as PyTorch's: fused optimizers insist on it.
            layout = torch.empty_like(parameter, dtype=kind, device="meta")
            layout = torch.view_as_real(layout) if kind.is_complex else layout
            end = self._length + layout.numel()
            self._places.append((slice(self._length, end), layout.shape, layout.stride()))
            self._length = end

    def begin_step(self, exchange: TreeLayout) -> None:
        """Forget the step before."""
        self._exchange = exchange
        self._stack = TreeStack[_Gradients](exchange.count, _added)
        self.used = [False] * len(self.parameters)

    def begin(self) -> None:
        """Forget the microbatch before."""
        self.missing = set(self.parameters)
        self.is_added = False

    def take(self, number: int, *, counts: bool) -> None:
        """Add the gradients that the parameters have, as those of a microbatch."""
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
        """Send the subtrees' sums here, and `payload` behind them. Collective."""
        behind = self._length + (0 if payload is None else len(payload))
        rows = self._exchange.rows(behind, self._dtype, self.parameters[0].device)
        # A rank that has failed has other subtrees, and no rank will use the sum.
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
        self.sum = TreeAllReduce(self._exchange, rows)

    def _parts(self, row: Tensor) -> list[Tensor]:
        """Return the numbers of each parameter, in its layout."""
        return [row[where].as_strided(shape, stride) for where, shape, stride in self._places]

    def finish(self) -> Tensor:
        """Wait for the sums, and return those of the payload of all ranks."""
        self._sums = self.sum.result()
        del self.sum
        return self._sums[self._length :]

    def set_gradients(self, used: Iterable[bool]) -> None:
        """Set the gradients of the parameters that are used to the sums."""
        parts = self._parts(self._sums)
        del self._sums  # whose memory is that of the gradients
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
    """Return buckets of one dtype, from the last parameter to the first, as gradients come."""
    filled: list[list[nn.Parameter]] = []
    last: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in reversed(list(parameters)):
        bucket, most = last.get(parameter.dtype), _MOST if parameter.is_cpu else _MOST_OF_GPU
        if bucket is None or sum(p.numel() for p in [*bucket, parameter]) > most:
            bucket = last[parameter.dtype] = []
            filled.append(bucket)
        bucket.append(parameter)
    return list(map(Bucket, filled))

"""The gradients of a step of "exact", summed in the fixed tree while the last backward runs.

Does not support sparse gradients.
"""

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.futures import Future

from pardata.strategies.exact._tree_all_reduce import IDENTITY, TreeAllReduce, TreeLayout, TreeStack

# The gradient of each parameter that was used, in float32 or float64, complex ones as real.
_Gradients: TypeAlias = dict[Tensor, Tensor]

_AHEAD = 2  # buckets in flight before the first is summed, which bounds the memory of received rows


class TreeGradients:
    """The gradients of this rank's microbatches, and their sums over all ranks.

    With several ranks, the gradients of the last microbatch are in DDP's buckets. `send` adds the
    earlier ones in the bucket.

    Args:
        parameters: the trained parameters, in the same order on every rank.
        layout: the layout of the step.

    Attributes:
        last_counts: whether the last microbatch, whose gradients `send` gets, counts.
        is_finished: whether all buckets are summed over all ranks.
        tail: the sums over all ranks of the numbers behind the last bucket, padded.
    """

    last_counts = is_finished = False
    tail: Tensor

    def __init__(self, parameters: list[nn.Parameter], layout: TreeLayout) -> None:
        self._params, self._layout = parameters, layout
        self._stack = TreeStack[_Gradients](layout.count, _added)
        self._used, self._unused = set[Tensor](), set[Tensor]()  # before the last microbatch, in it
        self._sent: list[tuple[TreeAllReduce, Tensor, Future[Tensor]]] = []

    def keep(self, number: int, *, counts: bool) -> None:
        """Move the gradients of a microbatch from ``.grad`` to the tree, if it counts."""
        kept: _Gradients = {}
        for parameter in self._params:
            if (gradient := parameter.grad) is not None:
                kept[parameter] = _wide(_real(gradient.detach()))
                parameter.grad = None
        if not counts:
            kept.clear()
        self._used |= kept.keys()
        if number >= 0:  # not a placeholder
            self._stack.push((number, number + 1), kept)

    def complete(self) -> None:
        """Run a backward for the parameters that the last microbatch has not used."""
        self._unused = {parameter for parameter in self._params if parameter.grad is None}
        if unused := list(self._unused):
            torch.autograd.backward(unused, [torch.full_like(p, IDENTITY) for p in unused])

    def used(self) -> list[bool]:
        """Return for each parameter whether a microbatch of this rank that counts has used it."""
        in_last = set(self._params) - self._unused if self.last_counts else set()
        return [p in self._used or p in in_last for p in self._params]

    def send(
        self, parameters: list[Tensor], buffer: Tensor, done: Future[Tensor], tail: Tensor
    ) -> None:
        """Start the sum of a bucket, for DDP to wait for. Collective.

        Args:
            parameters: the parameters of the bucket.
            buffer: their gradients in the last microbatch, to which earlier ones are added.
            done: gets the sums over all ranks.
            tail: numbers to send behind them, equally many on each rank.
        """
        if not self.last_counts:
            buffer.fill_(IDENTITY)
        flat = _wide(buffer)
        sums = _views(flat, parameters)
        # Removed, so that their memory is free as soon as they are added.
        earlier = [{p: kept.pop(p) for p in sums if p in kept} for _, kept in self._stack.subtrees]
        apart = max(self._layout.local_count - 1, 0)
        for kept in reversed(earlier[apart:]):  # the last microbatch completes these subtrees
            _added(kept, sums)
        rows = self._rows(flat, [*earlier[:apart], sums], tail)
        self._sent.append((TreeAllReduce(self._layout, rows), buffer, done))
        if len(self._sent) > _AHEAD:
            self._sent[-1 - _AHEAD][0].add()

    def _rows(self, flat: Tensor, subtrees: list[_Gradients], tail: Tensor) -> Tensor:
        """Return the sums of this rank's subtrees, as `TreeLayout.rows`; the last are in `flat`."""
        count, behind = flat.numel(), flat.numel() + tail.numel()
        fits = self._layout.is_plain or not behind % self._layout.size
        if len(subtrees) == 1 and fits:
            return (torch.cat([flat, tail]) if tail.numel() else flat).view(1, -1)
        rows = self._layout.rows(behind, flat.dtype, flat.device)
        # A failed rank has other subtrees, but no rank uses the result then.
        for row, sums in zip(rows, subtrees, strict=False):
            if len(sums) < len(subtrees[-1]):
                row.fill_(IDENTITY)
            if sums:
                into = _views(row, subtrees[-1])
                torch._foreach_copy_([into[p] for p in sums], [*sums.values()])  # as optimizers do
        rows[:, count:] = IDENTITY
        rows[0, count:behind] = tail
        return rows

    def finish(self) -> None:
        """Finish the sums of all buckets, which DDP then copies to ``.grad``."""
        for tree, _, _ in self._sent[-_AHEAD:]:
            tree.add()
        for tree, buffer, done in self._sent:
            sums, count = tree.result(), buffer.numel()
            self.tail = sums[count:]
            done.set_result(sums[:count].to(buffer.dtype))
        self._sent.clear()
        self.is_finished = True

    def set_gradients(self, used: list[bool]) -> None:
        """Set ``.grad`` to the sums, in a single process; to None where no rank has used it."""
        sums = self._stack.total() if self._layout.size == 1 else {}
        for parameter, gradient in sums.items():
            real = torch.view_as_complex(gradient) if parameter.is_complex() else gradient
            parameter.grad = real.to(parameter.dtype)
        for parameter, is_used in zip(self._params, used, strict=True):
            if not is_used:
                parameter.grad = None


def _wide(numbers: Tensor) -> Tensor:
    return numbers if numbers.dtype == torch.float64 else numbers.float()


def _real(numbers: Tensor) -> Tensor:
    return torch.view_as_real(numbers) if numbers.is_complex() else numbers


def _views(flat: Tensor, parameters: Iterable[Tensor]) -> _Gradients:
    """Return the part of each parameter in a bucket, in the layout of the parameter."""
    views: _Gradients = {}
    end = 0
    for parameter in parameters:
        # Its layout in DDP, which is dense, although the parameter may not be.
        is_plain = parameter.is_contiguous()
        real = _real(parameter if is_plain else torch.empty_like(parameter, device="meta"))
        views[parameter] = flat.as_strided(real.shape, real.stride(), flat.storage_offset() + end)
        end += real.numel()
    return views


def _added(left: _Gradients, right: _Gradients) -> _Gradients:
    """Return the sums, in the memory of `right`."""
    if both := [parameter for parameter in right if parameter in left]:
        torch._foreach_add_([right[p] for p in both], [left[p] for p in both])  # as optimizers do
    return {**left, **right}

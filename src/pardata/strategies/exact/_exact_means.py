"""Means of an exact step: of the buffers as its microbatches leave them, of loss and metrics."""

import torch
from torch import Tensor, nn

from pardata.model._buffers import real_buffers
from pardata.ranks._device import widest
from pardata.step._count import Piece
from pardata.strategies.exact._fixed_tree import Stack
from pardata.strategies.exact._ordered_sum import NOTHING, Exchange


class Means:
    """The means of what microbatches make of a module's buffers, each from the start of the step.

    Floating-point buffers, as batch norm's statistics, become the mean of what each microbatch
    leaves, weighted like gradients. Others, which count, become what the first of them leaves. The
    means of loss and metrics travel with them, all in float64 if the device has that.

    Args:
        module: whose buffers.
        device: on which they are added.
        exchange: of the step.
        first: the number of the first microbatch here that counts.

    Attributes:
        shapes: of all buffers, by name.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, exchange: Exchange, first: int
    ) -> None:
        self._module, self._device = module, device
        self._exchange, self._first = exchange, first
        self._start = {name: buffer.clone() for name, buffer in real_buffers(module).items()}
        self.shapes = _shapes(self._start)
        self._real = [name for name, b in self._start.items() if b.is_floating_point()]
        self._counting = [name for name in self._start if name not in self._real]
        self._dtype = widest(device)
        self._before = self._flat(self._start, self._real, self._dtype)
        self._counts = self._flat(self._start, self._counting, torch.int64)
        self._turned = torch.zeros_like(self._counts)  # what the first microbatch adds to them
        self._stack = Stack[Tensor](exchange.count, Tensor.add_)

    def add(self, piece: Piece, told: Tensor) -> None:
        """Add what a microbatch has changed, and loss and metrics that it has `told`; restore."""
        leaf = None
        if piece.count:  # else others restore
            leaf = torch.cat([told.to(self._device), *self._changes(piece.number)])
            leaf *= piece.count
        if piece.number >= 0:  # no placeholder
            self._stack.push((piece.number, piece.number + 1), leaf)

    def _changes(self, number: int) -> list[Tensor]:
        """Return what a microbatch has changed, and restore."""
        if not self._start:
            return []
        now = self._now()
        after = self._flat(now, self._real, self._dtype)
        same = (after == self._before) | (after.isnan() & self._before.isnan())
        if number == self._first:
            self._turned = self._flat(now, self._counting, torch.int64) - self._counts
        for name, start in self._start.items():
            now[name].copy_(start)
        return [(after - self._before).masked_fill_(same, NOTHING)]

    def rows(self, count: int, first: int) -> Tensor:
        """Return the subtrees' sums here, one row each, at least one.

        Args:
            count: the numbers of loss and metrics.
            first: the number of the first microbatch of all ranks that counts.
        """
        self._told = count
        turned = self._turned * (first == self._first)
        # In halves that a float64 holds; of all ranks one has any.
        halves = torch.cat([turned >> 32, turned & 0xFFFFFFFF]).to(self._dtype)
        size = self._told + len(self._before)
        rows = self._exchange.rows(size + len(halves), self._dtype, self._device)
        rows.fill_(NOTHING)
        # A rank that has failed has other subtrees, and no rank will use the sum.
        for row, piece in zip(rows, self._stack.values(), strict=False):
            if piece is not None:
                row[:size] = piece
        rows[0, size : size + len(halves)] = halves
        return rows

    def apply(self, sums: Tensor, total: int) -> Tensor:
        """Set the buffers, and return the means of loss and metrics.

        Args:
            sums: of the rows of all ranks.
            total: what the microbatches of all ranks count.
        """
        count = len(self._counts)
        sizes = [self._told, len(self._before), count, count]
        told, changes, high, low = sums[: sum(sizes)].split(sizes)
        means: Tensor = told / total
        if not self._start:
            return means
        counts = self._counts + (high.long() << 32) + low.long()
        now = self._now()
        for names, flat in ((self._real, self._before + changes / total), (self._counting, counts)):
            parts = flat.split([self._start[name].numel() for name in names])
            for name, part in zip(names, parts, strict=True):
                now[name].copy_(part.view(now[name].shape))
        return means

    def _now(self) -> dict[str, Tensor]:
        """Return the buffers as they are: those that there were, in their shapes."""
        now = real_buffers(self._module)  # once: a walk through a deep module takes long
        shapes = _shapes(now)
        for name, shape in self.shapes.items():
            if shapes.get(name) != shape:
                raise RuntimeError(
                    f"a buffer must keep its shape within a step under strategy 'exact', but "
                    f"`{name}` was {shape} and is {shapes.get(name)}: keep what grows in a plain "
                    f"attribute, or give the buffer its full size from the beginning"
                )
        return now

    def _flat(self, buffers: dict[str, Tensor], names: list[str], dtype: torch.dtype) -> Tensor:
        parts = [buffers[name].reshape(-1).to(self._device, dtype) for name in names]
        return torch.cat([torch.empty(0, dtype=dtype, device=self._device), *parts])


def _shapes(buffers: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(buffer.shape) for name, buffer in buffers.items()}

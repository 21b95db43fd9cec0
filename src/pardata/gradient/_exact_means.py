"""Means of an exact step: of the buffers as its microbatches leave them, of loss and metrics."""

import torch
from torch import Tensor, nn

from pardata.gradient import _fixed_point
from pardata.gradient._exact_sums import summed
from pardata.model._buffers import real_buffers

_NONE = 2**53  # the number of a microbatch that there is not


class Means:
    """The means of what microbatches make of a module's buffers, each from the start of the step.

    Floating-point buffers, as batch norm's statistics, become the mean of what each microbatch
    leaves, weighted like gradients; others, which count, become what the first of them leaves.
    Those of loss and metrics travel with them.

    Attributes:
        names: of the floating-point buffers.
        shapes: of all buffers, by name.
        first: the number of the first microbatch here that counts.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._start = {name: buffer.clone() for name, buffer in real_buffers(module).items()}
        self.shapes = _shapes(self._start)
        self.names = [name for name, b in self._start.items() if b.is_floating_point()]
        self._counting = [name for name in self._start if name not in self.names]
        self._before = self._flat(self._start, self.names, torch.float64)
        self._most = torch.zeros_like(self._before)  # of each number, the largest change
        self._words = torch.zeros(2, len(self._before), dtype=torch.int64, device=device)
        # As the first microbatch leaves them.
        self._counts = torch.zeros_like(self._flat(self._start, self._counting, torch.int64))
        self.first = _NONE

    def restore(self) -> None:
        """Put back what was there at the start of the step, but for what has another shape now."""
        for name, buffer in real_buffers(self._module).items():
            start = self._start.get(name)
            if start is not None and start.shape == buffer.shape:
                buffer.copy_(start)

    def add(self, weight: float, number: int) -> None:
        """Add ``weight`` times what microbatch `number` has changed; restore."""
        now = self._now()
        after = self._flat(now, self.names, torch.float64)
        same = (after == self._before) | (after.isnan() & self._before.isnan())
        change = (after - self._before).masked_fill_(same, 0.0)
        self._most = torch.maximum(self._most, change.abs())  # NaN if either is
        _fixed_point.add(change, weight, *self._words)
        if self.first == _NONE:
            self.first = number
            self._counts = self._flat(now, self._counting, torch.int64)
        for name, start in self._start.items():
            now[name].copy_(start)

    def peaks(self) -> list[Tensor]:
        """Return, of each floating-point buffer, the largest change, as a vector of one."""
        return [_fixed_point.largest(part)[None] for part in self._split(self._most, self.names)]

    def add_up(self, rows: list[tuple[Tensor, int]], total: int, first: int) -> Tensor:
        """Add up those of all ranks, and return the means of loss and metrics. Collective.

        NaN for one that is infinite, NaN or too large anywhere.

        Args:
            rows: of each microbatch here the loss and then all metrics, and what it counts.
            total: what those of all ranks count.
            first: the number of the first microbatch that counts, which one rank has.
        """
        if first != self.first:
            self._counts.zero_()
        parts = _words_of(rows, total).view(-1), self._words.view(-1), self._counts
        sums = summed(torch.cat(parts)).split([len(part) for part in parts])
        self._words, self._counts = sums[1].view(2, -1), sums[2]
        low, high, bad = sums[0].view(3, -1)
        return _fixed_point.value(low, high).where(bad == 0, torch.nan)

    def apply(self) -> None:
        """Set the buffers, from sums that are those of all ranks."""
        now = self._now()
        # Where nothing was added, not even 0.0, for -0.0 would become that.
        means = self._before + _fixed_point.value(*self._words)
        means = means.where(self._words.any(dim=0), self._before)
        for names, flat in ((self.names, means), (self._counting, self._counts)):
            for name, part in zip(names, self._split(flat, names), strict=True):
                now[name].copy_(part.view(now[name].shape))

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

    def _split(self, flat: Tensor, names: list[str]) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = flat.split([self._start[name].numel() for name in names])
        return parts


def _words_of(rows: list[tuple[Tensor, int]], total: int) -> Tensor:
    """Return low and high words of the means of `rows`, and how often one could not be added."""
    words = torch.zeros(3, len(rows[0][0]), dtype=torch.int64, device=rows[0][0].device)
    low, high, bad = words
    for numbers, count in rows:
        if count:
            fits = numbers.abs() <= _fixed_point.LARGEST
            _fixed_point.add(numbers.where(fits, 0.0), count / total, low, high)
            bad += ~fits
    return words


def _shapes(buffers: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(buffer.shape) for name, buffer in buffers.items()}

"""Loss and buffers of an exact step: means of what its microbatches leave, all from one start."""

import torch
from torch import Tensor, nn

from pardata.gradient import _fixed_point
from pardata.gradient._exact_sums import summed
from pardata.model._buffers import real_buffers

LOSS = "the loss"
_NONE = 2**53  # the number of a microbatch that there is not


class Means:
    """The mean loss, and that of what microbatches make of a module's buffers, each from the start.

    Floating-point buffers, as batch norm's statistics, become the mean of what each microbatch
    leaves, weighted like gradients; others, which count, become what the first of them leaves.

    Attributes:
        names: of what has a mean: the loss, and floating-point buffers.
        peaks: of each of those, the largest loss or change.
        shapes: of all buffers, by name.
        count: of the numbers in what has a mean.
        first: the number of the first microbatch here that counts.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._start = {name: buffer.clone() for name, buffer in real_buffers(module).items()}
        self.shapes = _shapes(module)
        self._floating = [name for name, b in self._start.items() if b.is_floating_point()]
        self._counting = [name for name in self._start if name not in self._floating]
        self.names = [LOSS, *self._floating]
        self.peaks = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self._before = self._flat(self._start, self._floating, torch.float64)
        self.count = 1 + len(self._before)
        self.first = _NONE
        counts = self._flat(self._start, self._counting, torch.int64)
        self._sent = counts.new_zeros(2 * self.count + len(counts))
        self._words = self._sent[: 2 * self.count].view(2, -1)
        self._counts = self._sent[2 * self.count :]  # as the first microbatch leaves them

    def restore(self) -> None:
        """Put back what was there at the start of the step, but for what has another shape now."""
        for name, buffer in real_buffers(self._module).items():
            start = self._start.get(name)
            if start is not None and start.shape == buffer.shape:
                buffer.copy_(start)

    def add(self, loss: Tensor, weight: float, number: int) -> None:
        """Add ``weight`` times the loss of microbatch `number` and what it has changed; restore."""
        now = self._now()
        after = self._flat(now, self._floating, torch.float64)
        same = (after == self._before) | (after.isnan() & self._before.isnan())
        change = (after - self._before).masked_fill_(same, 0.0)
        loss = loss.detach().reshape(1).to(change)
        parts = [loss, *self._split(change, self._floating)]
        peaks = torch.stack([_fixed_point.largest(part) for part in parts])
        self.peaks = torch.maximum(self.peaks, peaks)  # NaN if either is
        _fixed_point.add(torch.cat([loss, change]), weight, *self._words)
        if self.first == _NONE:
            self.first = number
            self._counts.copy_(self._flat(now, self._counting, torch.int64))
        self.restore()

    def add_up(self, first: int, size: int) -> Tensor:
        """Add up those of all ranks, of which one has the `first` microbatch. Return the mean loss.

        Collective.
        """
        if first != self.first:
            self._counts.zero_()
        summed(self._sent, size)
        self._sums = _fixed_point.value(*self._words)
        return self._sums[0]

    def apply(self) -> None:
        """Set the buffers, from sums that are those of all ranks."""
        now = self._now()
        # Where nothing was added, not even 0.0, for -0.0 would become that.
        is_changed = self._words[:, 1:].any(dim=0)
        means = torch.where(is_changed, self._before + self._sums[1:], self._before)
        for names, flat in ((self._floating, means), (self._counting, self._counts)):
            for name, part in zip(names, self._split(flat, names), strict=True):
                now[name].copy_(part.view(now[name].shape))

    def _now(self) -> dict[str, Tensor]:
        """Return the buffers as they are: those that there were, in their shapes."""
        now = _shapes(self._module)
        for name, shape in self.shapes.items():
            if now.get(name) != shape:
                raise RuntimeError(
                    f"a buffer must keep its shape within a step under strategy 'exact', but "
                    f"`{name}` was {shape} and is {now.get(name)}: keep what grows in a plain "
                    f"attribute, or give the buffer its full size from the beginning"
                )
        return real_buffers(self._module)

    def _flat(self, buffers: dict[str, Tensor], names: list[str], dtype: torch.dtype) -> Tensor:
        parts = [buffers[name].reshape(-1).to(self._device, dtype) for name in names]
        return torch.cat([torch.empty(0, dtype=dtype, device=self._device), *parts])

    def _split(self, flat: Tensor, names: list[str]) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = flat.split([self._start[name].numel() for name in names])
        return parts


def means_of(rows: list[tuple[Tensor, int]], total: int, size: int, device: torch.device) -> Tensor:
    """Return the means of metrics over the microbatches of all ranks, the same at every size.

    NaN for one that is infinite, NaN or too large anywhere. Collective, if there are metrics.

    Args:
        rows: of each microbatch here the loss and then all metrics, and what it counts.
        total: what those of all ranks count.
        size: how many ranks there are.
        device: of the model.
    """
    metrics = [(row[1:], count) for row, count in rows if len(row) > 1]
    if not metrics:
        return torch.empty(0, dtype=torch.float64, device=device)
    words = torch.zeros(3, len(metrics[0][0]), dtype=torch.int64, device=device)
    low, high, bad = words
    for numbers, count in metrics:
        if count:
            fits = numbers.abs() <= _fixed_point.LARGEST
            _fixed_point.add(numbers.where(fits, 0.0), count / total, low, high)
            bad += ~fits
    summed(words, size)
    return _fixed_point.value(low, high).where(bad == 0, torch.nan)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(buffer.shape) for name, buffer in module.named_buffers()}

"""Buffers of an exact step, as batch norm's statistics: every microbatch begins from the same."""

import torch
from torch import Tensor, nn

from pardata.gradient import _fixed_point


class Buffers:
    """The buffers of a module at the start of a step, and the mean of what microbatches make of it.

    Floating-point ones become the mean of what each microbatch leaves, weighted like gradients;
    others, which count, become what the first microbatch leaves that has a weight.

    Attributes:
        shapes: of all of them, by name.
        floating: the names of the floating-point ones.
        peaks: of each of those, the largest change.
        low: words of the sums of those changes.
        high: likewise.
        others: as the first microbatch here that has a weight has left them; 0 before.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._start = {name: buffer.clone() for name, buffer in _real(module).items()}
        self.shapes = _shapes(module)
        self.floating = [name for name, buffer in self._start.items() if buffer.is_floating_point()]
        self._counting = [name for name in self._start if name not in self.floating]
        self._before = self._flat(self._start, self.floating, torch.float64)
        self.peaks = torch.zeros(len(self.floating), dtype=torch.float64, device=device)
        self.low, self.high = (_fixed_point.zeros(len(self._before), device) for _ in range(2))
        self.others = torch.zeros_like(self._flat(self._start, self._counting, torch.int64))

    def restore(self) -> None:
        """Put back what was there at the start of the step."""
        for name, buffer in _real(self._module).items():
            if name in self._start:
                buffer.copy_(self._start[name])

    def add(self, weight: float, *, is_first: bool) -> None:
        """Add ``weight`` times what a microbatch has changed; keep what the first has counted."""
        now = self._now()
        if weight and self.floating:
            after = self._flat(now, self.floating, torch.float64)
            same = (after == self._before) | (after.isnan() & self._before.isnan())
            change = (after - self._before).masked_fill_(same, 0.0)
            peaks = _fixed_point.largest_of_each(self._split(change, self.floating))
            self.peaks = torch.maximum(self.peaks, peaks)  # NaN if either is
            _fixed_point.add(change, weight, self.low, self.high)
        if is_first:
            self.others = self._flat(now, self._counting, torch.int64)

    def apply(self) -> None:
        """Set the buffers, from sums and others that are those of all ranks."""
        now = self._now()
        changed = (self.low != 0) | (self.high != 0)
        means = self._before + _fixed_point.value(self.low, self.high)
        # Where nothing was added, not even 0.0, for -0.0 would become that.
        means = torch.where(changed, means, self._before)
        for names, flat in ((self.floating, means), (self._counting, self.others)):
            for name, part in zip(names, self._split(flat, names), strict=True):
                now[name].copy_(part.view(now[name].shape))

    def _now(self) -> dict[str, Tensor]:
        """Return the buffers as they are: those that there were, in their shapes."""
        now = _shapes(self._module)
        for name, shape in self.shapes.items():
            if now.get(name) != shape:
                msg = (
                    f"a buffer must keep its shape within a step under strategy 'exact', but "
                    f"`{name}` was {shape} and is {now.get(name)}: keep what grows in a plain "
                    f"attribute, or give the buffer its full size from the beginning"
                )
                raise RuntimeError(msg)
        return _real(self._module)

    def _flat(self, buffers: dict[str, Tensor], names: list[str], dtype: torch.dtype) -> Tensor:
        parts = [buffers[name].reshape(-1).to(self._device, dtype) for name in names]
        return torch.cat([torch.empty(0, dtype=dtype, device=self._device), *parts])

    def _split(self, flat: Tensor, names: list[str]) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = flat.split([self._start[name].numel() for name in names])
        return parts


def _real(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a module, complex numbers as two real ones."""
    return {
        name: torch.view_as_real(b.data) if b.is_complex() else b.data
        for name, b in module.named_buffers()
    }


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(buffer.shape) for name, buffer in module.named_buffers()}

"""Buffers of an exact step, as batch norm's statistics: every microbatch begins from the same."""

import torch
from torch import Tensor, nn

from pardata.gradient import _fixed_point
from pardata.gradient._exact_report import Largest


class Buffers:
    """The buffers of a module at the start of a step, and the mean of what microbatches make of it.

    Floating-point ones become the mean of what each microbatch leaves, weighted like gradients;
    others, which count, become what the first microbatch leaves that has a weight.

    Attributes:
        sums: low and high words, of the changes of the floating-point ones.
        names: of all of them, with their shapes.
        others: as the first microbatch here that has a weight has left them; 0 before.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._start = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self.names = _shapes(self._start)
        floating = [
            name
            for name, buffer in self._start.items()
            if buffer.is_floating_point() or buffer.is_complex()
        ]
        self.floating = floating
        self._counting = [name for name in self._start if name not in floating]
        self._before = self._flat(self._start, floating, torch.float64)
        self.sums = [_fixed_point.zeros(len(self._before), device) for _ in range(2)]
        self.others = torch.zeros_like(self._flat(self._start, self._counting, torch.int64))

    def restore(self) -> None:
        """Put back what was there at the start of the step."""
        for name, buffer in self._module.named_buffers():
            if name in self._start:
                buffer.data.copy_(self._start[name])

    def take(self, weight: float, largest: Largest, *, is_first: bool) -> None:
        """Take what a microbatch has left."""
        if not self._start:
            return
        now = self._now()
        if weight and self.floating:
            after = self._flat(now, self.floating, torch.float64)
            same = (after == self._before) | (after.isnan() & self._before.isnan())
            change = (after - self._before).masked_fill_(same, 0.0)
            for name, part in zip(self.floating, self._split(change), strict=True):
                largest.see(name, part)
            _fixed_point.add(change, weight, *self.sums)
        if is_first:
            self.others = self._flat(now, self._counting, torch.int64)

    def apply(self) -> None:
        """Set the buffers, from sums and others that are those of all ranks."""
        now = self._now()
        low, high = self.sums
        changed = (low != 0) | (high != 0)
        # Where nothing was added, not even 0.0, for -0.0 would become that.
        means = torch.where(changed, self._before + _fixed_point.value(low, high), self._before)
        for name, mean in zip(self.floating, self._split(means), strict=True):
            _real(now[name].data).copy_(mean.view(_real(now[name]).shape))
        sizes = [self._start[name].numel() for name in self._counting]
        for name, value in zip(self._counting, self.others.split(sizes), strict=True):
            now[name].data.copy_(value.view(now[name].shape))

    def _now(self) -> dict[str, Tensor]:
        """Return the buffers as they are: those that there were, in their shapes."""
        now = dict(self._module.named_buffers())
        found = _shapes(now)
        for name, shape in self.names.items():
            if found.get(name) != shape:
                msg = (
                    f"a buffer must keep its shape within a step under strategy 'exact', but "
                    f"`{name}` was {shape} and is {found.get(name)}: keep what grows in a plain "
                    f"attribute, or give the buffer its full size from the beginning"
                )
                raise RuntimeError(msg)
        return now

    def _flat(self, buffers: dict[str, Tensor], names: list[str], dtype: torch.dtype) -> Tensor:
        parts = [
            _real(buffers[name].detach()).reshape(-1).to(self._device, dtype) for name in names
        ]
        return torch.cat([torch.empty(0, dtype=dtype, device=self._device), *parts])

    def _split(self, flat: Tensor) -> tuple[Tensor, ...]:
        sizes = [_real(self._start[name]).numel() for name in self.floating]
        parts: tuple[Tensor, ...] = flat.split(sizes)
        return parts


def _real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _shapes(buffers: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(buffer.shape) for name, buffer in buffers.items()}

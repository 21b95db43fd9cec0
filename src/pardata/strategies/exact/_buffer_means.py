"""Means of an exact step: of the buffers as its microbatches leave them, of loss and metrics."""

import zlib

import torch
from torch import Tensor, nn

from pardata._pytree import bytes_of
from pardata.environment._device import widest_float_dtype
from pardata.model._buffers import real_buffers
from pardata.strategies._loss_weights import Microbatch
from pardata.strategies.exact._tree_all_reduce import IDENTITY, TreeLayout, TreeStack


class BufferMeans:
    """The means of what microbatches make of a module's buffers, each from the start of the step.

    Floating-point buffers, as batch norm's statistics, become the mean of what each microbatch
    leaves, weighted like gradients. Others, which count, become what the first of them leaves. The
    means of loss and metrics travel with them, all in float64 if the device has that.

    Args:
        module: whose buffers; they are added on its device.
        exchange: of the step.
        first: the number of the first microbatch here that counts.

    Attributes:
        shapes: of all buffers, by name.
        digest: a hash of all buffers, which must be equal on all ranks; on a GPU of their shapes,
            because nobody waits for it.
    """

    def __init__(self, module: nn.Module, exchange: TreeLayout, first: int) -> None:
        self._module, self._exchange, self._first = module, exchange, first
        self._device = next(module.parameters()).device
        self._dtype = widest_float_dtype(self._device)
        start = real_buffers(module)
        self.shapes = _shapes(start)
        self._real = [name for name, buffer in start.items() if buffer.is_floating_point()]
        self._counting = [name for name in start if name not in self._real]
        self._start = {name: buffer.clone() for name, buffer in start.items()}
        self._before = self._flat(start, self._real, self._dtype)
        self._counts = self._flat(start, self._counting, torch.int64)
        self._counted = torch.zeros_like(self._counts)  # what the first microbatch adds to them
        values = [self._before, self._counts] if self._device.type == "cpu" else []
        self.digest = zlib.crc32(
            b"".join(map(bytes_of, values)), zlib.crc32(repr(self.shapes).encode())
        )
        self._stack = TreeStack[Tensor](exchange.count, Tensor.add_)

    def add(self, microbatch: Microbatch, values: Tensor) -> None:
        """Add what a microbatch has changed, with the `values` of its loss and metrics; restore.

        The values are already times what the microbatch counts.
        """
        number, leaf = microbatch.number, None
        if microbatch.count:  # else others restore
            changes = [changed * microbatch.count for changed in self._changes(number)]
            leaf = torch.cat([values.to(self._device), *changes])
        if number >= 0:  # no placeholder
            self._stack.push((number, number + 1), leaf)

    def _changes(self, number: int) -> list[Tensor]:
        """Return what a microbatch has changed, and restore."""
        if not self._start:
            return []
        now = self._now()
        after = self._flat(now, self._real, self._dtype)
        same = (after == self._before) | (after.isnan() & self._before.isnan())
        if number == self._first:
            self._counted = self._flat(now, self._counting, torch.int64) - self._counts
        self.put_back(now)
        return [(after - self._before).masked_fill_(same, IDENTITY)]

    def rows(self, count: int, first: int) -> Tensor:
        """Return the subtrees' sums here, one row each, at least one.

        Args:
            count: the numbers of loss and metrics.
            first: the number of the first microbatch of all ranks that counts.
        """
        # In words that each dtype holds; of all ranks one has any.
        words = (self._counted * (first == self._first)).view(torch.int16).to(self._dtype)
        size = count + len(self._before)
        self._sizes = count, len(self._before), len(words)
        rows = self._exchange.rows(sum(self._sizes), self._dtype, self._device)
        rows.fill_(IDENTITY)
        # A rank that has failed has other subtrees, and no rank will use the sum.
        for row, (_, subtree) in zip(rows, self._stack.subtrees, strict=False):
            if subtree is not None:
                row[:size] = subtree
        rows[0, size : size + len(words)] = words
        return rows

    def apply(self, sums: Tensor, total: float) -> Tensor:
        """Set the buffers, and return the sums of loss and metrics.

        Args:
            sums: of the rows of all ranks.
            total: what the microbatches of all ranks count.
        """
        parts: list[Tensor] = [*sums[: sum(self._sizes)].split(self._sizes)]
        values, changes, words = parts
        if not self._start:
            return values
        counts = self._counts + words.to(torch.int16).view(torch.int64)
        now = self._now()
        for names, flat in ((self._real, self._before + changes / total), (self._counting, counts)):
            buffers = [now[name] for name in names]
            parts = flat.split([buffer.numel() for buffer in buffers])
            _set(buffers, [part.view(b.shape) for part, b in zip(parts, buffers, strict=True)])
        return values

    def put_back(self, found: dict[str, Tensor] | None = None) -> None:
        """Set the buffers, those that were `found`, to what they were at the start of the step."""
        now = found or real_buffers(self._module)
        same = [n for n, start in self._start.items() if n in now and now[n].shape == start.shape]
        _set([now[name] for name in same], [self._start[name] for name in same])

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
        parts = [buffers[name].reshape(-1).to(self._device) for name in names]
        parts = parts or [torch.empty(0, device=self._device)]
        return torch.cat(parts).to(dtype)  # a conversion of each would be a kernel of each


def _set(buffers: list[Tensor], values: list[Tensor]) -> None:
    if buffers:
        torch._foreach_copy_(buffers, values)  # as optimizers do


def _shapes(buffers: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(buffer.shape) for name, buffer in buffers.items()}

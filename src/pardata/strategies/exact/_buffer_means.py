"""Means of an exact step, summed in the fixed tree: of buffers, and of loss and metrics.

Does not support buffers that change their shape within a step.
"""

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pardata._pytree import bytes_of
from pardata.environment._device import widest_float_dtype
from pardata.model._grads_and_buffers import real_buffers
from pardata.model._replica_state import bits_of
from pardata.store._round import Facts
from pardata.strategies._loss_weights import Microbatch
from pardata.strategies.exact._tree_all_reduce import IDENTITY, TreeLayout, TreeStack


class BufferMeans:
    """The means over microbatches of a module's buffers, each computed from the step's start.

    Floating-point buffers, as batch norm's statistics, become the mean of their values after each
    microbatch, weighted like gradients. Integer buffers, which count, become their values after the
    first microbatch. Loss and metrics are summed with them, all in float64 if the device has it.

    Args:
        module: the module with the buffers, on whose device sums are computed.
        layout: the layout of the step.

    Attributes:
        shapes: the shape of each buffer by name.
        digest: a hash of all buffers, which ranks compare; on a GPU only of their shapes, so that
            the host does not wait.
    """

    def __init__(self, module: nn.Module, layout: TreeLayout) -> None:
        self._module, self._layout = module, layout
        self._device = next(module.parameters()).device
        self._dtype = widest_float_dtype(self._device)
        start = real_buffers(module)
        self.shapes = _shapes(start)
        self._real = [name for name, buffer in start.items() if buffer.is_floating_point()]
        self._counting = [name for name in start if name not in self._real]
        self._start = {name: buffer.clone() for name, buffer in start.items()}
        self._before = self._flat(start, self._real, self._dtype)
        self._counts = self._flat(start, self._counting, torch.int64)
        self._counted = torch.zeros_like(self._counts)  # the change by the first microbatch
        values = [self._before, self._counts] if start and self._device.type == "cpu" else []
        self.digest = zlib.crc32(
            b"".join(map(bytes_of, values)), zlib.crc32(str(self.shapes).encode())
        )
        self._stack = TreeStack[Tensor](layout.count, Tensor.add_)
        self._sizes = [0, self._before.numel(), 4 * self._counts.numel()]

    def facts(self) -> Facts:
        """Return the shapes and bits of the buffers at the start of the step, by name."""
        return {
            name: f"shape {tuple(b.shape)}, bits {bits_of(b)}" for name, b in self._start.items()
        }

    def add(self, microbatch: Microbatch, values: Tensor) -> None:
        """Add a microbatch's changes of buffers, and the `values` of loss and metrics.

        The values, a vector, are already multiplied by the count of the microbatch. Called before
        its backward, in which activation checkpointing would change buffers again.
        """
        self._sizes[0] = values.numel()
        leaf = values.to(self._device)
        if self._start:
            now = self._now()
            if microbatch.number == 0:
                self._counted = self._flat(now, self._counting, torch.int64) - self._counts
            after = self._flat(now, self._real, self._dtype)
            same = (after == self._before) | (after.isnan() & self._before.isnan())
            change = (after - self._before).masked_fill_(same, IDENTITY)
            leaf = torch.cat([leaf, change * microbatch.count])
        self._leaf = leaf if microbatch.count else torch.full_like(leaf, IDENTITY)
        if microbatch.number >= 0:  # not for a placeholder
            self._stack.push((microbatch.number, microbatch.number + 1), self._leaf)

    def rows(self) -> Tensor:
        """Return this rank's subtree sums, of shape (max(1, subtrees), length)."""
        sums = [subtree for _, subtree in self._stack.subtrees]
        rows = torch.stack(sums or [self._leaf])
        if not self._counting:
            return rows
        # As 16-bit words, which each dtype represents exactly. Zeros on ranks but the first.
        words = torch.full((len(rows), self._sizes[2]), IDENTITY).to(rows)
        words[0] = self._counted.view(torch.int16)
        return torch.cat([rows, words], 1)

    def apply(self, sums: Tensor, total: float) -> Tensor:
        """Set the buffers to their means, and return the sums of loss and metrics.

        Args:
            sums: the tree sum of all ranks' rows, of shape (length,).
            total: the count of all microbatches of all ranks.
        """
        parts: list[Tensor] = [*sums[: sum(self._sizes)].split(self._sizes)]
        values, changes, words = parts
        if self._start:
            now = self._now()
            counts = self._counts + words.to(torch.int16).view(torch.int64)
            _set_flat((now[name] for name in self._real), self._before + changes / total)
            _set_flat((now[name] for name in self._counting), counts)
        return values

    def put_back(self) -> None:
        """Restore the values of buffers from the start of the step."""
        now = real_buffers(self._module) if self._start else {}
        same = [n for n, start in self._start.items() if n in now and now[n].shape == start.shape]
        if same:
            torch._foreach_copy_([now[n] for n in same], [self._start[n] for n in same])

    def _now(self) -> dict[str, Tensor]:
        """Return the current buffers; raise if the shape of one has changed in this step."""
        now = real_buffers(self._module)  # once, because a search through a deep module is slow
        shapes = _shapes(now)
        for name, shape in self.shapes.items():
            if shapes.get(name) != shape:
                raise RuntimeError(
                    f"a buffer must keep its shape in a step of 'exact', but `{name}` was {shape} "
                    f"and is {shapes.get(name)}: give it its full size from the beginning"
                )
        return now

    def _flat(self, buffers: dict[str, Tensor], names: list[str], dtype: torch.dtype) -> Tensor:
        if not names:
            return torch.empty(0, dtype=dtype, device=self._device)
        # One conversion, and so one kernel, for all.
        return torch.cat([buffers[name].reshape(-1).to(self._device) for name in names]).to(dtype)


def _set_flat(buffers: Iterable[Tensor], values: Tensor) -> None:
    """Set buffers to the parts of a vector, in few kernels."""
    if held := list(buffers):
        parts = values.split([buffer.numel() for buffer in held])
        torch._foreach_copy_(
            held, [part.view(b.shape) for part, b in zip(parts, held, strict=True)]
        )


def _shapes(buffers: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(buffer.shape) for name, buffer in buffers.items()}

"""Strategy "dp": PyTorch's DataParallel, reading through to its module."""

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from pardata.collective._tree import leaves
from pardata.model._read_through import ReadThrough


class ReadThroughDP(ReadThrough, DataParallel[nn.Module]):
    """`DataParallel` that reads through, and takes the mean of losses computed inside the model."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._rows: list[int] = []

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Split the batch as PyTorch does, and remember the sizes of the pieces."""
        chunks, chunk_kwargs = super().scatter(inputs, kwargs, device_ids)
        self._rows = [_rows(pair, self.dim) for pair in zip(chunks, chunk_kwargs, strict=True)]
        return chunks, chunk_kwargs

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join the outputs as PyTorch does, but a scalar of each piece to their weighted mean."""
        first = outputs[0]
        if isinstance(first, Tensor) and first.ndim == 0 and first.is_floating_point():
            return self._mean(outputs, output_device)
        # By the constructors, as PyTorch does: the outputs of some libraries know no other way.
        if isinstance(first, Mapping):
            keys = (key for key, *_ in zip(*outputs, strict=True))  # equally many in each
            columns = ((key, [output[key] for output in outputs]) for key in keys)
            return type(first)((key, self.gather(own, output_device)) for key, own in columns)  # type: ignore[call-arg]  # dict and its kind
        if is_dataclass(first):  # of which PyTorch knows nothing
            items = ((name, [getattr(o, name) for o in outputs]) for name in vars(first))
            changed = {name: self.gather(own, output_device) for name, own in items}
            return replace(first, **changed)  # type: ignore[type-var]  # no class
        if isinstance(first, tuple | list):
            parts = [self.gather(part, output_device) for part in zip(*outputs, strict=True)]
            return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
        return super().gather(outputs, output_device)

    def _mean(self, scalars: list[Tensor], device: Any) -> Tensor:
        # Pieces may be unequal; the loss of the batch weights them by their rows.
        stacked = torch.stack([scalar.to(device) for scalar in scalars])
        # No rows are seen where the model takes no tensors; then there is nothing to weight by.
        rows = self._rows if any(self._rows) else [1] * len(scalars)
        weights = torch.tensor(rows, dtype=stacked.dtype, device=stacked.device)
        return (stacked * weights).sum() / weights.sum()


def _rows(values: Iterable[Any], dim: int) -> int:
    """Return the rows of the first tensor found."""
    tensors = (leaf for _, leaf in leaves(list(values)) if isinstance(leaf, Tensor))
    return next((tensor.shape[dim] if tensor.ndim > dim else 1 for tensor in tensors), 0)

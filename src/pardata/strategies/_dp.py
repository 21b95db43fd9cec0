"""Strategy "dp": a transparent DataParallel, in one process."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from pardata._pytree import leaves_with_path
from pardata.environment._device import visible_devices
from pardata.model._transparent import TransparentWrapper
from pardata.strategies._strategy import Strategy, WrapOptions


class TransparentDP(TransparentWrapper, DataParallel[nn.Module]):
    """`DataParallel` that is transparent, and gathers scalar losses to their mean."""

    _rows: Sequence[int] = ()  # the number of rows of each part of the batch

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Split the batch as PyTorch does, and record the number of rows of each part."""
        chunks, chunk_kwargs = super().scatter(inputs, kwargs, device_ids)
        self._rows = [_rows(pair, self.dim) for pair in zip(chunks, chunk_kwargs, strict=True)]
        return chunks, chunk_kwargs

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Gather outputs as PyTorch does, but scalars to their mean, also in tuples and lists."""
        first = outputs[0]
        if isinstance(first, Tensor) and first.ndim == 0 and first.is_floating_point():
            return self._mean(outputs, output_device)
        if isinstance(first, tuple | list):
            parts = [self.gather(part, output_device) for part in zip(*outputs, strict=True)]
            return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
        return super().gather(outputs, output_device)

    def _mean(self, scalars: list[Tensor], device: Any) -> Tensor:
        # Weighted by rows, because parts may be unequal.
        stacked = torch.stack([scalar.to(device) for scalar in scalars])
        # Equal weights if the model takes no tensors.
        rows = self._rows if any(self._rows) else [1] * len(scalars)
        weights = torch.tensor(rows, dtype=stacked.dtype, device=stacked.device)
        return (stacked * weights).sum() / weights.sum()


def _rows(values: Iterable[Any], dim: int) -> int:
    """Return the rows of the first tensor in `values`."""
    tensors = (leaf for _, leaf in leaves_with_path(list(values)) if isinstance(leaf, Tensor))
    return next((tensor.shape[dim] if tensor.ndim > dim else 1 for tensor in tensors), 0)


class DpStrategy(Strategy):
    name = "dp"
    wrapper = DataParallel
    is_collective = needs_group = False

    def check(self, model: nn.Module, settings: WrapOptions) -> None:  # noqa: ARG002  # others use it
        size, synchronizes = settings.world.size, settings.sync_batchnorm
        if size > 1 or synchronizes:
            raise ValueError(
                f"strategy 'dp' must run in one process, without SyncBatchNorm, but has {size} "
                f"process(es) and sync_batchnorm={synchronizes}: use 'ddp', with one for each GPU"
            )

    def device(self, settings: WrapOptions) -> torch.device | str:
        ids = settings.options.get("device_ids")
        # Without a GPU, DataParallel ignores device_ids and runs the module.
        if settings.device is None and ids and (seen := visible_devices()):
            return torch.device(seen[0].type, ids[0]) if isinstance(ids[0], int) else ids[0]
        return super().device(settings)

    def wrap(self, model: nn.Module, settings: WrapOptions) -> nn.Module:
        return TransparentDP(model, **settings.options)

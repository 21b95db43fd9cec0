"""Strategy "dp": PyTorch's DataParallel, reading through to its module."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from pardata.model._read_through import ReadThrough
from pardata.model._replication import Settings, Strategy, move
from pardata.ranks._arguments import checked_device
from pardata.ranks._logger import get_logger

_log = get_logger(__name__)


class ReadThroughDP(ReadThrough, DataParallel[nn.Module]):
    """`DataParallel` that reads through, and takes the mean of losses computed inside the model."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._rows: list[int] = []
        self._log_hidden_names()

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Split the batch as PyTorch does, and remember the sizes of the pieces."""
        chunks, chunk_kwargs = super().scatter(inputs, kwargs, device_ids)
        self._rows = [
            _rows([*args, *named.values()], self.dim)
            for args, named in zip(chunks, chunk_kwargs, strict=True)
        ]
        return chunks, chunk_kwargs

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join the outputs as PyTorch does, but a scalar of each piece to their weighted mean."""
        outputs = list(outputs)
        first = outputs[0]
        if isinstance(first, Tensor) and first.ndim == 0 and first.is_floating_point():
            return self._mean(outputs, output_device)
        if isinstance(first, Mapping):
            return type(first)(  # type: ignore[call-arg]  # dict and its kind, as PyTorch asks
                (key, self.gather([output[key] for output in outputs], output_device))
                for key in first
            )
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
    for value in values:
        if isinstance(value, Tensor):
            return value.shape[dim] if value.ndim > dim else 1
        if isinstance(value, Mapping):
            value = list(value.values())  # noqa: PLW2901  # look inside
        if isinstance(value, list | tuple) and (rows := _rows(value, dim)):
            return rows
    return 0


class Scattered(Strategy):
    """Strategy "dp"."""

    name = "dp"
    wrapper = DataParallel
    is_collective = False

    def options_of(self) -> Callable[..., object]:
        return DataParallel

    def check(self, model: nn.Module, settings: Settings) -> None:
        super().check(model, settings)
        size = settings.here.size
        if size > 1 or settings.sync_batchnorm:
            what = f"{size} processes" if size > 1 else "sync_batchnorm=True"
            msg = (
                f"strategy 'dp' must run in one process, without SyncBatchNorm, but has {what}: "
                f"use 'ddp', with one process per GPU"
            )
            raise ValueError(msg)

    def place(self, model: nn.Module, settings: Settings) -> None:
        device, ids = settings.device, settings.options.get("device_ids")
        if device is None:
            # Without a GPU DataParallel ignores device_ids, and runs all the same.
            first = ids[0] if ids and torch.cuda.is_available() else settings.here.device
            device = torch.device("cuda", first) if isinstance(first, int) else first
        move(model, checked_device(device))

    def wrap(self, model: nn.Module, settings: Settings) -> nn.Module:
        wrapped = ReadThroughDP(model, **settings.options)
        if len(wrapped.device_ids) < 2:
            _log.info(
                "strategy 'dp' did not scatter: it has %d GPU(s), and splits a batch over two or "
                "more",
                len(wrapped.device_ids),
                once=True,
            )
        return wrapped

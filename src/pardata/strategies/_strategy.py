"""The base class of strategies, which check and wrap a model, and those of one process.

"none" is the module itself, "dp" a transparent DataParallel.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pardata._pytree import leaves_with_path
from pardata.environment._device import visible_devices
from pardata.environment._logger import get_logger
from pardata.environment._world import World
from pardata.model._grads_and_buffers import broadcast_coalesced
from pardata.model._state_dict import load_full
from pardata.model._transparent import TransparentWrapper
from pardata.model._unwrap import Wrapper, unwrap, wrapper_chain
from pardata.store._round import Facts
from pardata.strategies._step import Step

_log = get_logger(__name__)


class WrapOptions(NamedTuple):
    """The arguments of `wrap_model` except for the model, and the world."""

    world: World
    device: torch.device | str | None
    sync_batchnorm: bool
    options: dict[str, Any]


class Strategy(ABC):
    """A strategy to keep the replicas of a model equal. There is one object of each class.

    Attributes:
        name: the argument of `wrap_model`.
        wrapper: the class of the wrapper that this strategy puts around a model.
        is_collective: whether wrapping is collective, and compares the models of the ranks.
        needs_group: whether it needs a process group also for one rank.
        takes_sharded_parts: whether modules inside the model may be sharded already.
        takes_devices: whether the model may be spread over several devices.
        places_model: whether `wrap` moves the model to its device, part by part.
        extra_options: names of options that `options_of` does not take.
        step: the class of one step of `backward`.
    """

    name: str
    step: type[Step] = Step
    wrapper: type | tuple[()] = ()
    is_collective = needs_group = True
    takes_sharded_parts = takes_devices = places_model = False
    extra_options: Collection[str] = ()

    def check(self, model: nn.Module, settings: WrapOptions) -> None:  # noqa: B027  # some strategies have nothing to check
        """Raise for a model or options that this strategy does not support."""

    def facts(self, model: nn.Module, settings: WrapOptions) -> Facts:  # noqa: ARG002  # some strategies use them
        """Return facts that must be equal on all ranks, in addition to those of the model."""
        return {}

    def device(self, settings: WrapOptions) -> torch.device | str:
        """Return the device of the model."""
        return settings.world.device if settings.device is None else settings.device

    @abstractmethod
    def wrap(self, model: nn.Module, settings: WrapOptions) -> nn.Module:
        """Return the wrapped model. `model` is checked, and on its device unless `places_model`."""

    def options_of(self) -> Callable[..., object]:
        """Return the class or function that takes the options of `wrap_model`."""
        # "none" accepts the options of "ddp", because "auto" becomes either.
        return self.wrapper or DistributedDataParallel

    def state_dict(self, model: nn.Module) -> Mapping[str, Any]:
        """Return the state dict for a checkpoint, with the names of the module inside."""
        # A wrapper of pardata records in the metadata how the model was trained.
        ours: list[nn.Module] = [x for x in wrapper_chain(model) if isinstance(x, Wrapper)]
        state: Mapping[str, Any] = (ours or [unwrap(model)])[0].state_dict()
        return state

    load = staticmethod(load_full)  # called by `load_weights`


def broadcast_weights(model: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers. Collective."""
    tensors = [*model.parameters(), *model.buffers()]
    # Not sharded tensors, which have no replicas.
    broadcast_coalesced(tensor for tensor in tensors if not hasattr(tensor, "full_tensor"))


class NoneStrategy(Strategy):
    name = "none"
    is_collective = needs_group = False

    def wrap(self, model: nn.Module, settings: WrapOptions) -> nn.Module:
        if settings.world.size > 1:
            text = "under strategy 'none' each of the %d ranks trains a model of its own"
            _log.warning(text, settings.world.size, ranks=[0], once=True)
        return model


class TransparentDP(TransparentWrapper, DataParallel[nn.Module]):
    """`DataParallel` that is transparent, and gathers scalar losses to their mean."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._rows: list[int] = []

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
        size, synchronises = settings.world.size, settings.sync_batchnorm
        if size > 1 or synchronises:
            raise ValueError(
                f"strategy 'dp' must run in one process, without SyncBatchNorm, but has {size} "
                f"process(es) and sync_batchnorm={synchronises}: use 'ddp', with one for each GPU"
            )

    def device(self, settings: WrapOptions) -> torch.device | str:
        ids = settings.options.get("device_ids")
        # Without a GPU, DataParallel ignores device_ids and runs the module.
        if settings.device is None and ids and (seen := visible_devices()):
            return torch.device(seen[0].type, ids[0]) if isinstance(ids[0], int) else ids[0]
        return super().device(settings)

    def wrap(self, model: nn.Module, settings: WrapOptions) -> nn.Module:
        return TransparentDP(model, **settings.options)

"""The base class of strategies, which check and wrap a model, and "none", the module itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pardata.environment._logger import get_logger
from pardata.environment._world import World
from pardata.model._grads_and_buffers import broadcast_coalesced
from pardata.model._state_dict import load_full
from pardata.model._unwrap import Versioned, wrapper_chain
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
        # The metadata says how the model was trained.
        chain = wrapper_chain(model)
        layers: list[nn.Module] = [layer for layer in chain if isinstance(layer, Versioned)]
        state: Mapping[str, Any] = [*layers, chain[-1]][0].state_dict()
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

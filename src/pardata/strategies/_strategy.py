"""What a strategy is: what it refuses, where it puts a model, how it wraps it, and its step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pardata.environment._world import World
from pardata.model._buffers import broadcast_coalesced
from pardata.model._state_dict import load_full
from pardata.model._unwrap import Wrapper, unwrap, wrapper_chain
from pardata.store._round import Facts
from pardata.strategies._step import Step


class WrapOptions(NamedTuple):
    """What `wrap_model` gets in addition to the model, and in which world."""

    world: World
    device: torch.device | str | None
    sync_batchnorm: bool
    options: dict[str, Any]


class Strategy(ABC):
    """How the replicas of a model are kept equal. There is one object of each class.

    Attributes:
        name: by which `wrap_model` takes it.
        wrapper: the class by which a layer of a model is known to be of this strategy.
        is_collective: whether all ranks wrap together, and compare what they wrap.
        needs_group: whether that needs a process group of one rank, too.
        takes_sharded_parts: whether parts of the model may be wrapped before it, block by block.
        takes_devices: whether the model may be spread over several.
        places_model: whether `wrap` moves the model to its device, part by part.
        extra_options: names of options that are not for what `options_of` returns.
        step: the class of one step of `backward`.
    """

    name: str
    step: type[Step] = Step
    wrapper: type | tuple[()] = ()
    is_collective = needs_group = True
    takes_sharded_parts = takes_devices = places_model = False
    extra_options: Collection[str] = ()

    def check(self, model: nn.Module, settings: WrapOptions) -> None:  # noqa: B027  # some strategies have nothing to check
        """Refuse a model or settings that this strategy cannot take, but others can."""

    def facts(self, model: nn.Module, settings: WrapOptions) -> Facts:  # noqa: ARG002  # some strategies use them
        """Return what must be the same on all ranks, in addition to a model at its place."""
        return {}

    def device(self, settings: WrapOptions) -> torch.device | str:
        """Return where the model is to be."""
        return settings.world.device if settings.device is None else settings.device

    @abstractmethod
    def wrap(self, model: nn.Module, settings: WrapOptions) -> nn.Module:
        """Return what is trained in place of `model`, which is checked and where it is to be."""

    def options_of(self) -> Callable[..., object]:
        """Return what takes the options of `wrap_model`, after the module."""
        # "none" takes those of "ddp", for "auto" becomes either.
        return self.wrapper or DistributedDataParallel

    def state_dict(self, model: nn.Module) -> Mapping[str, Any]:
        """Return what a checkpoint keeps of `model`, under the names of the module inside."""
        # A wrapper of ours that says in the metadata how the model was trained.
        ours: list[nn.Module] = [x for x in wrapper_chain(model) if isinstance(x, Wrapper)]
        state: Mapping[str, Any] = (ours or [unwrap(model)])[0].state_dict()
        return state

    load = staticmethod(load_full)  # what `load_weights` does


def broadcast_weights(model: nn.Module) -> None:
    """Let all ranks begin from rank 0's weights."""
    tensors = [*model.parameters(), *model.buffers()]
    # What was sharded before has no copy to equalise.
    broadcast_coalesced(tensor for tensor in tensors if not hasattr(tensor, "full_tensor"))

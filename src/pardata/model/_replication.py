"""What all strategies share: what they are told, how they check a model, and where they put it."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from pardata.model._state_dict import LoadedKeys, load_whole
from pardata.model._unwrap import is_parallel, unwrap
from pardata.ranks._arguments import check_flag, check_module
from pardata.ranks._world import World


@dataclass(frozen=True)
class Settings:
    """What `wrap_model` is told beside the model, and in which world."""

    here: World
    device: torch.device | str | None
    sync_batchnorm: bool
    options: dict[str, Any]


class Strategy(ABC):
    """How the replicas of a model are kept equal. There is one object of each class.

    Attributes:
        name: by which `wrap_model` takes it.
        wrapper: the class by which one of a model's `layers` is known to be of this strategy.
        is_collective: whether all ranks wrap together, and compare what they wrap.
        needs_group: whether that needs a process group of one rank, too.
        takes_all: whether the model may be one that has nothing to train.
        takes_sharded_parts: whether parts of the model may be wrapped before it, block by block.
    """

    name: str
    wrapper: type | tuple[()] = ()
    is_collective = needs_group = True
    takes_all = takes_sharded_parts = False

    def check(self, model: nn.Module, settings: Settings) -> None:
        """Refuse a model or settings that this strategy cannot take."""
        check_module(model)
        if is_parallel(model, but_for_sharded_parts=self.takes_sharded_parts):
            msg = (
                f"`model` must not be wrapped yet, but is or holds a wrapped module "
                f"({type(model).__name__}): pass unwrap(model), or wrap once, at the outside"
            )
            raise ValueError(msg)
        known = inspect.signature(self.options_of()).parameters.keys() - {"module"}
        for name in sorted(settings.options.keys() - known):
            msg = (
                f"`options` must be ones of strategy {self.name!r}, but {name!r} is not; there are "
                f"{', '.join(sorted(known))}"
            )
            raise TypeError(msg)
        check_flag("sync_batchnorm", settings.sync_batchnorm)
        if not self.takes_all:
            _check_trainable(model, self.name)
        if self.needs_group and settings.here.backend is None:
            msg = (
                f"strategy {self.name!r} needs a process group, but this process is in none: call "
                f"`pardata.init()` first, or use strategy='auto'"
            )
            raise RuntimeError(msg)

    def device(self, settings: Settings) -> torch.device | str:
        """Return where the model is to be."""
        return settings.here.device if settings.device is None else settings.device

    @abstractmethod
    def wrap(self, model: nn.Module, settings: Settings) -> nn.Module:
        """Return what is trained in place of `model`, which is checked and where it is to be."""

    def options_of(self) -> Callable[..., object]:
        """Return what takes the options of `wrap_model`, after the module."""
        # "none" takes those of "ddp", for "auto" becomes either.
        return self.wrapper or DistributedDataParallel

    def state_dict(self, model: nn.Module) -> Mapping[str, Any]:
        """Return what a checkpoint keeps of `model`, under the names of the module inside."""
        return unwrap(model).state_dict()

    def load(self, model: nn.Module, state: object, *, strict: bool, assign: bool) -> LoadedKeys:
        """Do what `load_weights` says."""
        return load_whole(model, state, strict=strict, assign=assign)


def _check_trainable(model: nn.Module, strategy: str) -> None:
    """Refuse a model that is not ready, or has nothing to train."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(is_lazy(tensor) for tensor in tensors):
        msg = "`model` must be initialised, but has lazy parameters: run one forward pass first"
        raise ValueError(msg)
    if any(tensor.is_meta for tensor in tensors):
        msg = (
            "`model` must have its weights on every rank, but has parameters or buffers on the "
            "meta device: build it on a real one, or call to_empty() and initialise them first"
        )
        raise ValueError(msg)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        msg = (
            f"`model` must have a parameter to train under strategy {strategy!r}, but "
            f"{type(model).__name__} has none that requires a gradient: use strategy='none'"
        )
        raise ValueError(msg)

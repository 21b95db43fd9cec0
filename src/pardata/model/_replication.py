"""What all strategies share: what they are told, how they check, move and equalise a model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pardata.model import _model_checks as checks
from pardata.model._batch_norm import with_synchronised_batch_norms
from pardata.model._state_dict import LoadedKeys, load_whole
from pardata.model._unwrap import unwrap
from pardata.ranks._arguments import check_flag, check_module, checked_device
from pardata.ranks._world import World

# Kinds of options that can be compared between ranks.
_PLAIN = (bool, int, float, str)


@dataclass(frozen=True)
class Settings:
    """What `wrap_model` is told beside the model, and in which world."""

    here: World
    device: torch.device | str | None
    sync_batchnorm: bool
    options: dict[str, Any]

    def facts(self, strategy: str) -> dict[str, object]:
        """Return what must be the same on all ranks, that they do not wait for each other."""
        told = {**self.options, "sync_batchnorm": self.sync_batchnorm}
        told.pop("output_device", None)  # each rank's own
        plain = {name: value for name, value in told.items() if isinstance(value, _PLAIN)}
        return {"the strategy": strategy, "the options": plain}


class Strategy(ABC):
    """How the replicas of a model are kept equal. There is one object of each class.

    Attributes:
        name: by which `wrap_model` takes it.
        wrapper: the class by which one of a model's `layers` is known to be of this strategy.
        is_collective: whether all ranks wrap together, and compare what they wrap.
        needs_group: whether that needs a process group of one rank, too.
        takes_sharded_parts: whether parts of the model may be wrapped before it, block by block.
    """

    name: str
    wrapper: type | tuple[()] = ()
    is_collective = True
    needs_group = False
    takes_sharded_parts = False

    def options_of(self) -> Callable[..., object]:
        """Return what takes the options of `wrap_model`, after the module."""
        return DistributedDataParallel

    def check(self, model: nn.Module, settings: Settings) -> None:
        """Refuse a model or settings that this strategy cannot take."""
        self.check_arguments(model, settings)
        checks.check_trainable(model, self.name)
        if self.needs_group and settings.here.backend is None:
            msg = (
                f"strategy {self.name!r} needs a process group, but this process is in none: call "
                f"`pardata.init()` first, or use strategy='auto'"
            )
            raise RuntimeError(msg)

    def check_arguments(self, model: nn.Module, settings: Settings) -> None:
        """Refuse what no strategy takes."""
        check_module(model)
        checks.check_not_wrapped(model, but_for_sharded_parts=self.takes_sharded_parts)
        checks.check_options(self.name, settings.options, self.options_of())
        check_flag("sync_batchnorm", settings.sync_batchnorm)

    def place(self, model: nn.Module, settings: Settings) -> None:
        """Move the model to its device."""
        given = settings.device
        move(model, settings.here.device if given is None else checked_device(given))

    @abstractmethod
    def wrap(self, model: nn.Module, settings: Settings) -> nn.Module:
        """Return what is trained in place of `model`, which is checked and where it belongs."""

    def state_dict(self, model: nn.Module) -> Mapping[str, Any]:
        """Return what a checkpoint keeps of `model`, under the names of the module inside."""
        state: Mapping[str, Any] = unwrap(model).state_dict()
        return state

    def load(
        self, model: nn.Module, state_or_path: object, *, strict: bool, assign: bool
    ) -> LoadedKeys:
        """Do what `load_weights` says."""
        return load_whole(model, state_or_path, strict=strict, assign=assign)


def move(model: nn.Module, device: torch.device) -> None:
    """Move a model, unless it is spread over several devices."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) < 2:  # else somebody placed its parts by hand
        model.to(device)


def with_batch_norms(model: nn.Module, settings: Settings) -> nn.Module:
    """Return the model with batch norms over all ranks, if that was asked for."""
    wanted = settings.sync_batchnorm and settings.here.size > 1
    return with_synchronised_batch_norms(model) if wanted else model


def broadcast_weights(model: nn.Module) -> None:
    """Let all ranks begin from rank 0's weights."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not hasattr(tensor, "full_tensor"):  # sharded before: there is no copy to equalise
                # As bytes: gloo of older torch knows no bool.
                sent = tensor.data.contiguous()
                dist.broadcast(sent.reshape(-1).view(torch.uint8), 0)
                tensor.data.copy_(sent)

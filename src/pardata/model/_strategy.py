"""The strategies, side by side: how each checks a model, where it puts it, and what it wraps it in.

What a step of `backward` does under each stands in one table in the room of steps, which comes
after this one.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from pardata.collective._agreement import Facts, agree, require_same
from pardata.model._batch_norm import is_synchronised, with_synchronised_batch_norms
from pardata.model._buffers import EqualBuffers, broadcast
from pardata.model._ddp import ReadThroughDDP
from pardata.model._dp import ReadThroughDP
from pardata.model._exact import ExactModel, check_kernels, kernels
from pardata.model._state_dict import LoadedKeys, load_sharded, load_whole
from pardata.model._unwrap import ShardedModule, is_parallel, layers, unwrap
from pardata.ranks._arguments import check_flag, check_module
from pardata.ranks._logger import get_logger
from pardata.ranks._world import World

_log = get_logger(__name__)


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


class Alone(Strategy):
    name = "none"
    is_collective = needs_group = False
    takes_all = True  # lazy modules too

    def wrap(self, model: nn.Module, settings: Settings) -> nn.Module:
        if settings.here.size > 1:
            text = "strategy 'none' in a world of %d: each rank trains a model of its own"
            _log.warning(text, settings.here.size, ranks=[0], once=True)
        return model


class Scattered(Strategy):
    name = "dp"
    wrapper = DataParallel
    is_collective = needs_group = False

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

    def device(self, settings: Settings) -> torch.device | str:
        ids = settings.options.get("device_ids")
        # Without a GPU DataParallel ignores device_ids, and runs all the same.
        if settings.device is None and ids and torch.cuda.is_available():
            return torch.device("cuda", ids[0]) if isinstance(ids[0], int) else ids[0]
        return super().device(settings)

    def wrap(self, model: nn.Module, settings: Settings) -> nn.Module:
        wrapped = ReadThroughDP(model, **settings.options)
        if len(wrapped.device_ids) < 2:
            has = f"strategy 'dp' did not scatter: it has {len(wrapped.device_ids)} GPU(s)"
            _log.info("%s, and splits a batch over two or more", has, once=True)
        return wrapped


class Replicated(Strategy):
    name = "ddp"
    wrapper = DistributedDataParallel

    def wrap(self, model: nn.Module, settings: Settings) -> nn.Module:
        model = _with_batch_norms(model, settings)
        options = {"gradient_as_bucket_view": True, **settings.options}
        old, new = "broadcast_buffers", "forward_sync_buffers"
        # From torch 2.13 on, where there is a new name, the old one is a property, and warns.
        if old in options and hasattr(DistributedDataParallel, old):
            options.setdefault(new, options.pop(old))
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) == 1 and (only := devices.pop()).type != "cpu":
            options.setdefault("device_ids", [only])
        return ReadThroughDDP(model, **options)


class Sharded(Strategy):
    name = "fsdp"
    wrapper = ShardedModule
    takes_sharded_parts = True

    def options_of(self) -> Callable[..., object]:
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # half a second

        return fully_shard

    def wrap(self, model: nn.Module, settings: Settings) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  # as above

        model = _with_batch_norms(model, settings)
        kind = next(model.parameters()).device.type
        if kind == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):  # torch 2.6
            msg = (
                f"strategy 'fsdp' on a CPU needs a newer torch, but this is {torch.__version__}, "
                f"whose fully_shard needs a GPU: install a newer one, or use 'ddp'"
            )
            raise RuntimeError(msg)
        # fully_shard shards what each rank has; unlike DDP it does not begin from rank 0's weights.
        _broadcast_weights(model)
        # Inside torch.compile, as PyTorch advises: names and hooks are then those of the module.
        size, module = settings.here.size, unwrap(model)
        mesh = init_device_mesh(kind, (size,))
        self.options_of()(module, **{"mesh": mesh, **settings.options})
        if size > 1:
            module.register_forward_hook(EqualBuffers())
        return model

    def load(self, model: nn.Module, state: object, *, strict: bool, assign: bool) -> LoadedKeys:
        return load_sharded(unwrap(model), state, strict=strict, assign=assign)


class Exact(Strategy):
    name = "exact"
    wrapper = ExactModel
    needs_group = False

    def check(self, model: nn.Module, settings: Settings) -> None:
        super().check(model, settings)
        if settings.sync_batchnorm or any(map(is_synchronised, model.modules())):
            msg = (
                "`sync_batchnorm` must be False under strategy 'exact', but is True or was before: "
                "make the model anew without it, for there batch norm takes the statistics of each "
                "microbatch, which are the same at every world size"
            )
            raise ValueError(msg)

    def wrap(self, model: nn.Module, settings: Settings) -> nn.Module:
        wrapped = ExactModel(model, **settings.options)

        def checked() -> Facts:
            check_kernels(model)
            return kernels(wrapped)

        place = "wrap_model(strategy='exact')"
        cure = "Start on machines and with versions that are alike, or use strategy 'ddp'."
        require_same(place, agree(settings.here, place, checked), cure)
        if settings.here.size > 1:
            _broadcast_weights(model)
        text = "strategy 'exact' computes with %d thread(s) on each rank, whatever their number"
        _log.info(text, torch.get_num_threads(), once=True)
        return wrapped

    def state_dict(self, model: nn.Module) -> Mapping[str, Any]:
        # With the wrapper's record in it of the kernels by which it was trained.
        (wrapper,) = (layer for layer in layers(model) if isinstance(layer, ExactModel))
        state: Mapping[str, Any] = wrapper.state_dict()
        return state


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


def _with_batch_norms(model: nn.Module, settings: Settings) -> nn.Module:
    """Return the model with batch norms over all ranks, if that was asked for."""
    wanted = settings.sync_batchnorm and settings.here.size > 1
    return with_synchronised_batch_norms(model) if wanted else model


def _broadcast_weights(model: nn.Module) -> None:
    """Let all ranks begin from rank 0's weights."""
    tensors = [*model.parameters(), *model.buffers()]
    # What was sharded before has no copy to equalise.
    broadcast(tensor for tensor in tensors if not hasattr(tensor, "full_tensor"))

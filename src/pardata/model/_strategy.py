"""The strategies, side by side: what each refuses, where it puts a model, and what it wraps it in.

And which of them a model is under: nothing else asks that.

What a step of `backward` does under each stands in one table in the room of steps, which comes
after this one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pardata.collective._agreement import Facts
from pardata.model._batch_norm import is_synchronised
from pardata.model._buffers import EqualBuffers, broadcast
from pardata.model._ddp import ReadThroughDDP
from pardata.model._dp import ReadThroughDP
from pardata.model._exact import ExactModel, kernels, refused_kernels
from pardata.model._old_optimizers import refuse_old_optimizers, remembered
from pardata.model._state_dict import load_sharded, load_whole
from pardata.model._unwrap import ShardedModule, layers, unwrap
from pardata.ranks._arguments import check_integer, check_module
from pardata.ranks._logger import get_logger
from pardata.ranks._world import World

_log = get_logger(__name__)


class Settings(NamedTuple):
    """What `wrap_model` gets in addition to the model, and in which world."""

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
        takes_devices: whether the model may be spread over several.
        cure: for ranks that differ.
    """

    name: str
    wrapper: type | tuple[()] = ()
    is_collective = needs_group = True
    takes_all = takes_sharded_parts = takes_devices = False
    cure = "Build the same model, in the same order, on every rank."

    def check(self, model: nn.Module, settings: Settings) -> None:  # noqa: B027  # for some only
        """Refuse a model or settings that this strategy cannot take, but others can."""

    def facts(self, model: nn.Module, settings: Settings) -> Facts:  # noqa: ARG002  # for some only
        """Return what must be the same on all ranks, in addition to a model at its place."""
        return {}

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

    load = staticmethod(load_whole)  # what `load_weights` does


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

    def check(self, model: nn.Module, settings: Settings) -> None:  # noqa: ARG002  # others look
        size, synchronises = settings.here.size, settings.sync_batchnorm
        if size > 1 or synchronises:
            raise ValueError(
                f"strategy 'dp' must run in one process, without SyncBatchNorm, but has {size} "
                f"process(es) and sync_batchnorm={synchronises}: use 'ddp', with one for each GPU"
            )

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
    takes_devices = True

    def wrap(self, model: nn.Module, settings: Settings) -> nn.Module:
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

        kind = next(model.parameters()).device.type
        if kind == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):  # torch 2.6
            raise RuntimeError(
                f"strategy 'fsdp' on a CPU needs a newer torch, but this is {torch.__version__}, "
                f"whose fully_shard needs a GPU: install a newer one, or use 'ddp'"
            )
        # fully_shard shards what each rank has; unlike DDP it does not begin from rank 0's weights.
        _broadcast_weights(model)
        # Inside torch.compile, as PyTorch advises: names and hooks are then those of the module.
        size, module = settings.here.size, unwrap(model)
        mesh = init_device_mesh(kind, (size,))
        before = remembered(module)
        self.options_of()(module, **{"mesh": mesh, **settings.options})
        refuse_old_optimizers(module, before)
        module.register_forward_hook(_shard_again)
        if size > 1:
            module.register_forward_hook(EqualBuffers())
        return model

    load = staticmethod(load_sharded)


class Exact(Strategy):
    name = "exact"
    wrapper = ExactModel
    needs_group = False
    cure = f"{Strategy.cure[:-1]}, with processors, versions and precisions that are alike."

    def check(self, model: nn.Module, settings: Settings) -> None:
        if settings.sync_batchnorm or any(map(is_synchronised, model.modules())):
            raise ValueError(
                "`sync_batchnorm` must be False under strategy 'exact', but is True or was before: "
                "make the model anew without it, for there batch norm takes the statistics of "
                "microbatches, the same at every world size"
            )
        check_integer("threads", settings.options.get("threads", 1), least=1)
        if (what := settings.options.get("on_overflow", "raise")) not in ("raise", "skip"):
            raise ValueError(f"`on_overflow` must be 'raise' or 'skip', but is {what!r}")

    def facts(self, model: nn.Module, settings: Settings) -> Facts:
        torch.set_num_threads(threads := settings.options.get("threads", 1))
        if refusal := refused_kernels(model, threads):
            raise refusal
        return kernels(model)

    def wrap(self, model: nn.Module, settings: Settings) -> nn.Module:
        if settings.here.size > 1:
            _broadcast_weights(model)
        text = "strategy 'exact' computes with %d thread(s) on each rank, whatever their number"
        _log.info(text, torch.get_num_threads(), once=True)
        return ExactModel(model, **settings.options)

    def state_dict(self, model: nn.Module) -> Mapping[str, Any]:
        # With the wrapper's record in it of the kernels by which it was trained.
        state: Mapping[str, Any] = replica_of(model).wrapper.state_dict()
        return state


def _shard_again(module: nn.Module, *_: object) -> None:
    """Shard what a forward without gradients has gathered: a forward hook.

    PyTorch leaves that to the backward, which does not come. An optimizer made in between would
    have the whole parameters, and train nothing.
    """
    if not torch.is_grad_enabled():
        parts: list[Any] = [part for part in module.modules() if isinstance(part, ShardedModule)]
        for part in parts:
            if hasattr(part, "reshard"):  # which FSDP's older wrapper has not
                part.reshard()


def _broadcast_weights(model: nn.Module) -> None:
    """Let all ranks begin from rank 0's weights."""
    tensors = [*model.parameters(), *model.buffers()]
    # What was sharded before has no copy to equalise.
    broadcast(tensor for tensor in tensors if not hasattr(tensor, "full_tensor"))


StrategyName: TypeAlias = Literal["auto", "none", "dp", "ddp", "fsdp", "exact"]

NONE, DP, DDP, FSDP, EXACT = Alone(), Scattered(), Replicated(), Sharded(), Exact()

# In the order in which they are looked for in a model: what reduces gradients first.
STRATEGIES: tuple[Strategy, ...] = (EXACT, DDP, FSDP, DP, NONE)


def named(name: object) -> Strategy:
    """Return the strategy of a name.

    Raises:
        ValueError: for a name that no strategy has.
    """
    for strategy in STRATEGIES:
        if name == strategy.name:
            return strategy
    names, given = ", ".join(map(repr, get_args(StrategyName))), repr(name)
    if isinstance(name, torch.optim.Optimizer):  # which other libraries wrap with the model
        given = "an optimizer: make that after wrapping, of what wrap_model returns"
    raise ValueError(f"`strategy` must be one of {names}, but is {given}")


class Replica(NamedTuple):
    """This rank's copy of a model, taken apart.

    Attributes:
        strategy: that keeps it equal to the others' copies.
        model: all of it, in its layers.
        wrapper: the layer of the model by which the strategy is known; under "none" the outermost.
        module: the module inside all layers.
    """

    strategy: Strategy
    model: nn.Module
    wrapper: Any
    module: nn.Module


def replica_of(model: nn.Module) -> Replica:
    """Take a model apart.

    Raises:
        TypeError: for what is no module.
    """
    check_module(model)
    found = layers(model)
    for strategy in STRATEGIES:
        for layer in found:
            if isinstance(layer, strategy.wrapper):
                return Replica(strategy, model, layer, found[-1])
    return Replica(NONE, model, model, found[-1])


def strategy_of(model: nn.Module) -> Strategy:
    """Return the strategy that `wrap_model`, or PyTorch's own class, has put around a model."""
    return replica_of(model).strategy

"""`wrap_model`: checks a model, compares it between ranks, and wraps it by a strategy."""

import inspect
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import nn

from pardata._pytree import require_dense
from pardata._validation import check_bool, check_module, type_with_article
from pardata.environment._device import check_supported, checked_device
from pardata.environment._world import require_world, store_client
from pardata.model._torch_internals import BatchNorm
from pardata.model._unwrap import ShardedModule, is_parallel, wrapper_chain
from pardata.store._round import raise_if_different, require_equal
from pardata.strategies._ddp import DdpStrategy
from pardata.strategies._dp import DpStrategy
from pardata.strategies._fsdp import FsdpStrategy
from pardata.strategies._strategy import NoneStrategy, Strategy, WrapOptions
from pardata.strategies.exact._exact import ExactStrategy

StrategyName: TypeAlias = Literal["auto", "none", "dp", "ddp", "fsdp", "exact"]

_NONE = NoneStrategy()
_SAME = "Build the same model, in the same order, with the same options, on every rank."

# In the order in which `find_strategy` tries them: those that reduce gradients first.
STRATEGIES = (ExactStrategy(), DdpStrategy(), FsdpStrategy(), DpStrategy(), _NONE)

# Types of options that are compared between ranks.
_PLAIN = (bool, int, float, str)


def wrap_model(
    model: nn.Module,
    strategy: StrategyName = "auto",
    *,
    device: torch.device | str | None = None,
    sync_batchnorm: bool = False,
    **options: Any,
) -> nn.Module:
    """Move `model` to its device and wrap it, so that training keeps all replicas equal.

    =========== ========================================================================
    ``"auto"``  ``"ddp"`` in a world larger than one, else ``"none"``
    ``"none"``  the module itself, moved and not wrapped: no cost at all
    ``"dp"``    `torch.nn.DataParallel`: one process, several GPUs
    ``"ddp"``   `torch.nn.parallel.DistributedDataParallel`: one process per device
    ``"fsdp"``  ``torch.distributed.fsdp.fully_shard``: parameters sharded, in place
    ``"exact"`` gradients by `backward` only: bitwise identical at every world size
    =========== ========================================================================

    Make the optimizer after `wrap_model`, which may replace the parameters. All replicas start from
    rank 0's weights. Under ``"ddp"`` and ``"dp"`` the result is a subclass of PyTorch's class. You
    read and write the module's attributes through it, and ``state_dict()`` has the names of
    ``unwrap(model)``. Under ``"ddp"`` buffers (batch norm's statistics) are equal after every
    training step, and a forward without gradients never communicates. If you add, exchange or
    convert parameters after wrapping, the next step raises; wrap again. The first backward, and the
    first after other parameters are trained, compares all gradients over the ranks by a digest.

    Under ``"fsdp"`` every forward is collective. `backward` averages the buffers over the ranks; a
    training forward outside it broadcasts rank 0's. By default each step holds all parameters on
    each rank at once. With ``blocks``, for example ``blocks=[Layer]``, a step holds the parameters
    of one block at a time, and those outside of all blocks. Other ranks than 0 may pass a model on
    the meta device.

    ``"exact"`` needs a loader with a `microbatch_size`, and adds the microbatches' gradients in a
    fixed order. It computes each gradient from the buffers at the start of the step, with a seed
    for that microbatch. On a CPU it sets the number of threads of the process to ``threads``.

    Collective, except under ``"none"`` and ``"dp"``. ``"ddp"`` and ``"fsdp"`` need `init`, also
    with one process.

    Args:
        model: any module that is not yet wrapped. One that is spread over several devices stays
            where it is.
        strategy: see the table.
        device: the world's device if not given; under ``"dp"`` the first of ``device_ids``.
        sync_batchnorm: replace each batch norm by PyTorch's ``SyncBatchNorm``, which uses the
            samples of all ranks. Every forward of it in training mode is then collective, and
            `backward` takes no `Microbatches`. PyTorch has none for CPUs: there the first forward
            in training mode raises an error. It changes nothing in a single process.
        options: for the wrapped class. ``"ddp"``: ``find_unused_parameters``, ``bucket_cap_mb``,
            ``static_graph`` and so on. ``"dp"``: ``device_ids``, ``output_device``, ``dim``.
            ``"fsdp"``: ``blocks``, ``replicate``, and options of ``fully_shard`` such as ``mesh``,
            ``mp_policy`` and ``offload_policy``. ``blocks`` are a class of modules, or a list of
            classes. ``blocks="auto"`` makes a block of each module in an outermost
            ``ModuleList``, if that list holds more than a tenth of the parameters. ``replicate`` is
            how many copies of the shards there are (1). ``"exact"``: ``threads`` (1), the same at
            every world size, and ``bucket_cap_mb``. ``"none"`` ignores the options of the others,
            so that one call serves every world size.

    Raises:
        TypeError: `model` is no module, or an option is unknown.
        ValueError: the strategy is unknown. Or the model is already wrapped, has nothing to train,
            has an embedding with ``max_norm``, or a batch norm that ``sync_batchnorm`` cannot
            replace. Or ``blocks`` are not in the model or share parameters with the rest, or
            ``replicate`` does not divide the number of ranks. PyTorch itself refuses a model that
            is not initialized, or on the meta device.
        RuntimeError: the models of the ranks differ in names, shapes or dtypes; it names the first
            parameter that does. Or there is no process group, or torch is too old for the strategy.

    >>> net = wrap_model(nn.Linear(2, 2))
    >>> type(net).__name__  # a single process
    'Linear'
    """
    world = require_world("wrap_model")
    name = strategy if strategy != "auto" else ("ddp" if world.size > 1 else "none")
    settings = WrapOptions(world, device, sync_batchnorm, options)

    def checked() -> dict[str, object]:
        chosen = strategy_by_name(name)
        _check(model, chosen, settings)
        target = checked_device(chosen.device(settings))
        if chosen.needs_group:
            check_supported(target, world.backend)
        if len(_devices(model)) < 2 and not chosen.places_model:
            model.to(target)  # otherwise the user has spread the model over devices
        if not chosen.is_collective:
            return {}
        return {**_facts_of(model, name, settings), **chosen.facts(model, settings)}

    if any(one.name == name and not one.is_collective for one in STRATEGIES):
        checked()
    else:  # also for an unknown name, so that other ranks do not wait
        differ = partial(raise_if_different, "wrap_model", cure=_SAME)
        require_equal(store_client(), "wrap_model", checked, differ)
    chosen = strategy_by_name(name)
    if sync_batchnorm and world.size > 1 and chosen.is_collective:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return chosen.wrap(model, settings)


def _check(model: nn.Module, chosen: Strategy, settings: WrapOptions) -> None:
    """Raise for a model or options that no strategy supports, or not this one."""
    check_module(model)
    if is_parallel(model, but_for_sharded_parts=chosen.takes_sharded_parts):
        cure = "pass unwrap(model), or wrap once, at the outside"
        if any(isinstance(part, ShardedModule) for part in model.modules()):
            cure = "build a new one, and call load_weights(new, old.state_dict())"
        msg = f"`model` must not be wrapped yet, but (a part of) {type(model).__name__} is: {cure}"
        raise ValueError(msg)
    options = inspect.signature(chosen.options_of()).parameters.keys()
    allowed = {*options, *chosen.extra_options} - {"module", "options"}
    for name in sorted(settings.options.keys() - allowed):
        raise TypeError(
            f"strategy {chosen.name!r} has no option {name!r}: it has {', '.join(sorted(allowed))}"
        )
    check_bool("sync_batchnorm", settings.sync_batchnorm)
    if chosen.is_collective:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(f"{type(model).__name__} has nothing to train: use strategy='none'")
        _check_devices(model, chosen)
        _check_embeddings(model, chosen)
    if chosen.needs_group and settings.world.backend is None:
        msg = f"strategy {chosen.name!r} needs a process group, but has none: call `pardata.init()`"
        raise RuntimeError(msg)
    chosen.check(model, settings)
    if settings.sync_batchnorm and settings.world.size > 1 and chosen.is_collective:
        _check_batch_norms(model)


def _check_devices(model: nn.Module, chosen: Strategy) -> None:
    """Raise for a model on several devices, if the strategy or the group does not allow it."""
    # A group that is bound to a device accepts tensors of no other.
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    why = f", in a process group bound to {bound}" if bound is not None else ""
    if len(devices := _devices(model)) > 1 and (why or not chosen.takes_devices):
        raise ValueError(
            f"`model` must be on one device under strategy {chosen.name!r}{why}, but is spread "
            f"over {', '.join(devices)}: move it to one, or use 'ddp' in a group without device_id"
        )


def _check_embeddings(model: nn.Module, chosen: Strategy) -> None:
    """Raise for an embedding with ``max_norm``, whose forward changes this rank's weights."""
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            msg = f"`{name or 'model'}` must not have `max_norm` under {chosen.name!r}: after each "
            msg += f"step call weight.data.renorm_({part.norm_type:g}, 0, {part.max_norm}) instead"
            raise ValueError(msg)


def _check_batch_norms(model: nn.Module) -> None:
    """Raise for subclasses of batch norm with another forward, which SyncBatchNorm would replace.

    Raises:
        ValueError: there is such a module; the error names the first one.
    """
    for name, module in model.named_modules():
        is_other = isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        if is_other and getattr(module.forward, "__func__", None) is not BatchNorm.forward:
            msg = f"`sync_batchnorm` must find PyTorch's own batch norms, but `{name or 'model'}` "
            msg += f"({type(module).__name__}) has another forward: add that in another module"
            raise ValueError(msg)


def _devices(model: nn.Module) -> list[str]:
    return sorted({str(parameter.device) for parameter in model.parameters()})


def _facts_of(model: nn.Module, strategy: str, settings: WrapOptions) -> dict[str, object]:
    """Return the facts of a model and its options that must be equal on all ranks."""
    # With options, because ranks that differ in find_unused_parameters would wait forever.
    options = {**settings.options, "sync_batchnorm": settings.sync_batchnorm}
    plain = {key: value for key, value in options.items() if isinstance(value, _PLAIN)}
    plain.pop("output_device", None)  # it differs between ranks
    facts: dict[str, object] = {"the strategy": strategy, "the options": plain}
    for number, (name, tensor) in enumerate([*model.named_parameters(), *model.named_buffers()]):
        if not tensor.is_meta:  # under "fsdp" another rank than 0 may have such a model
            require_dense(tensor, name)
        trained = ", trained" if tensor.requires_grad else ""
        facts[name] = f"{number}: {tuple(tensor.shape)} {tensor.dtype}{trained}"
    return facts


def strategy_by_name(name: object) -> Strategy:
    """Return the strategy with this name.

    Raises:
        ValueError: no strategy has this name.
    """
    for strategy in STRATEGIES:
        if name == strategy.name:
            return strategy
    names = ", ".join(map(repr, get_args(StrategyName)))
    given = type_with_article(name) if isinstance(name, torch.optim.Optimizer) else repr(name)
    raise ValueError(f"`strategy` must be one of {names}, but is {given}")


def find_strategy(model: nn.Module) -> tuple[Strategy, nn.Module]:
    """Return the strategy of a model, and the wrapper that belongs to it.

    Under ``"none"`` the wrapper is the model itself. PyTorch's wrappers are found too.

    Raises:
        TypeError: `model` is no module.
    """
    check_module(model)
    chain = wrapper_chain(model)
    found = ((s, layer) for s in STRATEGIES for layer in chain if isinstance(layer, s.wrapper))
    return next(found, (_NONE, model))


def strategy_of(model: nn.Module) -> Strategy:
    """Return the strategy of a model."""
    return find_strategy(model)[0]

"""One argument chooses how replicas are kept equal: the strategies, side by side."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pardata.collective._agreement import agree, require_same
from pardata.model._batch_norm import check_batch_norms, is_synchronised, synchronise_batch_norms
from pardata.model._buffers import EqualBuffers
from pardata.model._ddp import ReadThroughDDP
from pardata.model._dp import ReadThroughDP
from pardata.model._exact import ExactModel, check_kernels, kernels
from pardata.model._model_checks import (
    check_not_wrapped,
    check_options,
    check_same_models,
    signature,
)
from pardata.model._unwrap import unwrap
from pardata.ranks._arguments import check_flag, check_module, checked_device
from pardata.ranks._logger import get_logger
from pardata.ranks._world import World, require_world

_log = get_logger(__name__)

# Kinds of options that can be compared between ranks.
_PLAIN = (bool, int, float, str)


def wrap_model(
    model: nn.Module,
    strategy: str = "auto",
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
    ``"exact"`` gradients that only `backward` makes: the same to the last bit at every size
    =========== ========================================================================

    Under ``"ddp"`` and ``"dp"`` the result is a subclass of PyTorch's class. Attributes are read
    and written through, and ``state_dict()`` has the names of ``unwrap(model)``. All replicas start
    from rank 0's weights. Under ``"ddp"`` buffers (batch norm's statistics) are equal after every
    training step, and a forward without gradients never communicates; under ``"fsdp"`` rank 0's
    buffers are broadcast after each training forward, every forward is collective, and a model of
    many blocks is sharded block by block if you call ``fully_shard`` on those first (from equal
    weights). ``"exact"`` sums the gradients of microbatches in fixed point, each computed from the
    step's buffers under a seed of its own, with a fixed number of threads: it sets that of the
    process. Collective under ``"ddp"`` and ``"fsdp"``, which at one process need `init`, as
    everywhere, and under ``"exact"``.

    Args:
        model: any module, not yet wrapped. One that is spread over several devices stays where
            it is.
        strategy: see the table.
        device: the world's device if not given; under ``"dp"`` the first of ``device_ids``.
        sync_batchnorm: batch norm over the samples of all ranks: by PyTorch's ``SyncBatchNorm`` on
            GPUs, by our own on CPUs, where that does not run. Every forward of a batch norm in
            training mode is then collective. Nothing to do in a single process.
        options: for the wrapped class. ``"ddp"``: ``find_unused_parameters``, ``bucket_cap_mb``,
            ``static_graph`` and so on (``gradient_as_bucket_view`` is True unless told
            otherwise). ``"dp"``: ``device_ids``, ``output_device``, ``dim``. ``"fsdp"``:
            ``mesh``, ``mp_policy`` and so on. ``"exact"``: ``threads`` (1), the same at every
            size, and ``on_overflow`` (``"raise"``, or ``"skip"`` such steps with a warning).
            Ignored by ``"none"``, so that one call serves every size.

    Raises:
        TypeError: for what is not a module, or an unknown option.
        ValueError: for an unknown strategy, and a model that is already wrapped, has nothing to
            train or is not initialised.
        RuntimeError: where the ranks hold different models (names the first parameter that
            differs), or there is no process group.

    >>> net = wrap_model(nn.Linear(2, 2))
    >>> type(net).__name__  # a single process
    'Linear'
    """
    here = require_world("wrap_model")
    if strategy == "auto":
        strategy = "ddp" if here.size > 1 else "none"

    def checked() -> dict[str, object]:
        check_module(model)
        check_not_wrapped(model, strategy)
        _check_strategy(strategy)
        check_options(strategy, options)
        check_flag("sync_batchnorm", sync_batchnorm)
        plain = {name: value for name, value in options.items() if isinstance(value, _PLAIN)}
        plain.pop("output_device", None)  # each rank's own
        facts = signature(model, strategy, {**plain, "sync_batchnorm": sync_batchnorm})
        if strategy != "dp":  # here, where the others hear of it if a device is full or not there
            _move(model, here.device if device is None else checked_device(device))
        return facts

    if strategy in ("none", "dp"):
        checked()
    else:  # an unknown one too: the other ranks may have it right, and wait
        check_same_models(agree(here, "wrap_model", checked))
    return _STRATEGIES[strategy](model, here, device, sync_batchnorm, options)


def _none(
    model: nn.Module,
    here: World,
    _device: torch.device | str | None,
    _sync_batchnorm: bool,
    _options: dict[str, Any],
) -> nn.Module:
    if here.size > 1:
        _log.warning(
            "strategy 'none' in a world of %d: each rank trains a model of its own",
            here.size,
            ranks=[0],
            once=True,
        )
    return model


def _dp(
    model: nn.Module,
    here: World,
    device: torch.device | str | None,
    sync_batchnorm: bool,
    options: dict[str, Any],
) -> nn.Module:
    if here.size > 1 or sync_batchnorm:
        what = f"{here.size} processes" if here.size > 1 else "sync_batchnorm=True"
        msg = (
            f"strategy 'dp' must run in one process, without SyncBatchNorm, but has {what}: use "
            f"'ddp', with one process per GPU"
        )
        raise ValueError(msg)
    ids = options.get("device_ids")
    if device is None:
        # Without a GPU DataParallel ignores device_ids, and runs all the same.
        first = ids[0] if ids and torch.cuda.is_available() else here.device
        device = torch.device("cuda", first) if isinstance(first, int) else first
    _move(model, checked_device(device))
    wrapped = ReadThroughDP(model, **options)
    if len(wrapped.device_ids) < 2:
        _log.info(
            "strategy 'dp' did not scatter: it has %d GPU(s), and splits a batch over two or more",
            len(wrapped.device_ids),
            once=True,
        )
    return wrapped


def _ddp(
    model: nn.Module,
    here: World,
    _device: torch.device | str | None,
    sync_batchnorm: bool,
    options: dict[str, Any],
) -> nn.Module:
    _check_group(here, "ddp")
    model = _with_sync_batchnorm(model) if sync_batchnorm and here.size > 1 else model
    options = {"gradient_as_bucket_view": True, **options}
    # PyTorch's flag, by its new and its old name: ours replaces the broadcast before the forward.
    asked = [options.pop(name, None) for name in ("forward_sync_buffers", "broadcast_buffers")]
    options[_sync_flag()] = False
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and (only := devices.pop()).type != "cpu":
        options.setdefault("device_ids", [only])
    return ReadThroughDDP(model, sync_buffers=False not in asked, **options)


def _fsdp(
    model: nn.Module,
    here: World,
    _device: torch.device | str | None,
    sync_batchnorm: bool,
    options: dict[str, Any],
) -> nn.Module:
    _check_group(here, "fsdp")
    # Here and not above: it costs half a second.
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    model = _with_sync_batchnorm(model) if sync_batchnorm and here.size > 1 else model
    kind = next(model.parameters()).device.type
    if kind == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):  # torch 2.6
        msg = (
            f"strategy 'fsdp' on a CPU needs a newer torch, but this is {torch.__version__}, whose "
            f"fully_shard needs a GPU: install a newer one, or use 'ddp'"
        )
        raise RuntimeError(msg)
    # fully_shard shards what each rank has; unlike DDP it does not begin from rank 0's weights.
    _broadcast_weights(model)
    options = {"mesh": init_device_mesh(kind, (here.size,)), **options}
    # Inside torch.compile, as PyTorch advises: names and hooks are then those of the module.
    fully_shard(unwrap(model), **options)
    if here.size > 1:
        unwrap(model).register_forward_hook(EqualBuffers())
    return model


def _exact(
    model: nn.Module,
    here: World,
    _device: torch.device | str | None,
    sync_batchnorm: bool,
    options: dict[str, Any],
) -> nn.Module:
    if sync_batchnorm or any(map(is_synchronised, model.modules())):
        msg = (
            "`sync_batchnorm` must be False under strategy 'exact', but is True or was before: "
            "make the model anew without it, for there batch norm takes the statistics of each "
            "microbatch, which are the same at every world size"
        )
        raise ValueError(msg)
    wrapped = ExactModel(model, **options)

    def checked() -> dict[str, object]:
        check_kernels(model)
        return kernels(wrapped)

    told = agree(here, "wrap_model(strategy='exact')", checked)
    cure = "Start on machines and with versions that are alike, or use strategy 'ddp'."
    require_same("wrap_model(strategy='exact')", told, cure)
    if here.size > 1:
        _broadcast_weights(model)
    _log.info(
        "strategy 'exact' computes with %d thread(s) on each rank, whatever their number",
        torch.get_num_threads(),
        once=True,
    )
    return wrapped


_Wrap = Callable[[nn.Module, World, torch.device | str | None, bool, dict[str, Any]], nn.Module]
_STRATEGIES: dict[str, _Wrap] = {
    "none": _none,
    "dp": _dp,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "exact": _exact,
}


def _broadcast_weights(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not hasattr(tensor, "full_tensor"):  # sharded before: there is no copy to equalise
                # As bytes: gloo of older torch knows no bool.
                whole = tensor.data.contiguous()
                dist.broadcast(whole.reshape(-1).view(torch.uint8), 0)
                tensor.data.copy_(whole)


def _check_strategy(strategy: str) -> None:
    if not isinstance(strategy, str) or strategy not in _STRATEGIES:
        names = ", ".join(repr(name) for name in ["auto", *_STRATEGIES])
        msg = f"`strategy` must be one of {names}, but is {strategy!r}"
        raise ValueError(msg)


def _check_group(here: World, strategy: str) -> None:
    if here.backend is None:
        msg = (
            f"strategy {strategy!r} needs a process group, but this process is in none: call "
            f"`pardata.init()` first, or use strategy='auto'"
        )
        raise RuntimeError(msg)


def _move(model: nn.Module, device: torch.device | str) -> None:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) < 2:  # else somebody placed its parts by hand
        model.to(device)


def _with_sync_batchnorm(model: nn.Module) -> nn.Module:
    check_batch_norms(model)
    if any(parameter.device.type == "cpu" for parameter in model.parameters()):
        synchronise_batch_norms(model)  # by ours: PyTorch's refuses CPU tensors
        return model
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


def _sync_flag() -> str:
    new = "forward_sync_buffers"  # from torch 2.13 on, where the old name warns
    return (
        new
        if new in inspect.signature(DistributedDataParallel.__init__).parameters
        else "broadcast_buffers"
    )

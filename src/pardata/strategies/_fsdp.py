"""Strategy "fsdp": PyTorch's fully_shard, with buffers kept equal.

Does not shard blocks by default, and does not average buffers outside of `backward`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pardata._pytree import leaves_with_path
from pardata._validation import check_int
from pardata.data._batch import uneven_shares
from pardata.data._microbatches import Microbatches
from pardata.environment._device import checked_device, widest_float_dtype
from pardata.environment._logger import get_logger
from pardata.model import _fsdp_utils as fsdp_utils
from pardata.model._grads_and_buffers import StashedGradients, broadcast_coalesced, real_buffers
from pardata.model._state_dict import load_sharded
from pardata.model._torch_internals import parameters_of, uncompiled
from pardata.model._unwrap import ShardedModule, unwrap
from pardata.store._round import Facts
from pardata.strategies._forward import active_model, active_step
from pardata.strategies._fsdp_blocks import blocks_of, size_of
from pardata.strategies._loss_weights import Microbatch
from pardata.strategies._step import DistributedStep
from pardata.strategies._strategy import Strategy, WrapOptions, broadcast_weights

_log = get_logger(__name__)

_EQUAL = "_pardata_equal_buffers"  # an attribute of a module whose buffers are kept equal
_OLD = "_pardata_replaced"  # an attribute of replaced parameters
_LARGE = 10**8  # parameters: above this number sharding only the root is warned of


class FsdpStep(DistributedStep):
    """Step of "fsdp": each forward and backward is collective, so all ranks run equally many."""

    equal_microbatches = True

    def _prepare(self) -> None:
        super()._prepare()
        self._check_reduced()
        # After an evaluation without no_grad(), or a failed step of another model that ran this
        # one.
        fsdp_utils.reset_iter_state(self.layer)
        for name, parameter in self.layer.named_parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is None and parameter.requires_grad:
                raise RuntimeError(
                    f"each trained parameter must be sharded under 'fsdp', but `{name}` is not: "
                    f"wrap a model with it, and load_weights(new, old.state_dict(), strict=False)"
                )
            if mesh is not None and mesh.size() != self.size:
                msg = f"fully_shard must get a mesh of all {self.size} ranks, but got {mesh.size()}"
                raise ValueError(msg)

    def _check_reduced(self) -> None:
        """Raise if there are gradients that no rank has reduced, and drop them."""
        if fsdp_utils.has_unreduced_gradients(self.layer):
            fsdp_utils.reset_iter_state(self.layer)
            raise RuntimeError(
                "gradients are left unreduced: call set_requires_gradient_sync(True) and `backward`"
            )

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        with StashedGradients(parameters_of(self.module)):
            try:
                with active_step(self):
                    yield
                    self._check_reduced()
                    self._take_means()
                    if _EQUAL in vars(self.layer) and self.layer.training:
                        buffers = real_buffers(self.layer).values()
                        average_buffers(buffers, self.metrics.count, self.metrics.total)
            except BaseException:
                # It drops earlier gradients too, which `StashedGradients` restores next.
                fsdp_utils.reset_after_error(self.layer)
                raise

    @property
    def gradients_are_final(self) -> bool:
        # PyTorch reduces them before their hooks. Without a loader they may be rescaled afterwards.
        return self.loss_weights.most == 1 and isinstance(self.batch, Microbatches)

    @contextmanager
    def microbatch(self, microbatch: Microbatch) -> Iterator[None]:
        # Gradients are reduce-scattered in each microbatch, because accumulated ones would be
        # unsharded.
        self.layer.set_requires_all_reduce(microbatch is self.loss_weights.microbatches[-1])
        try:
            yield
        finally:
            self.layer.set_requires_all_reduce(True)


def average_buffers(buffers: Collection[Tensor], count: float, total: float | Tensor) -> None:
    """Set buffers to their mean, weighted by each rank's `count`, and integer buffers to rank 0's.

    Collective: one all-reduce and one broadcast.
    """
    floating = [buffer for buffer in buffers if buffer.is_floating_point()]
    broadcast_coalesced(buffer for buffer in buffers if not buffer.is_floating_point())
    if not floating:
        return
    # 0 times NaN is NaN, so a rank that counts 0 contributes zeros.
    widest = widest_float_dtype(floating[0].device)
    flat = torch.cat([buffer.to(widest).reshape(-1) for buffer in floating])
    flat = flat * count if count else torch.zeros_like(flat)
    dist.all_reduce(flat)
    flat /= total
    for buffer, mean in zip(floating, flat.split([b.numel() for b in floating]), strict=True):
        buffer.copy_(mean.view(buffer.shape))


class FsdpStrategy(Strategy):
    name = "fsdp"
    step = FsdpStep
    wrapper = ShardedModule
    takes_sharded_parts = places_model = True
    extra_options = frozenset({"blocks", "replicate"})

    def options_of(self) -> Callable[..., object]:
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # half a second

        return fully_shard

    def check(self, model: nn.Module, settings: WrapOptions) -> None:
        size, replicas = settings.world.size, settings.options.get("replicate", 1)
        check_int("replicate", replicas, least=1)
        if size % replicas:
            raise ValueError(f"`replicate` must divide the {size} ranks, but is {replicas}: pass 1")
        if {"replicate", "mesh"} <= settings.options.keys():
            raise ValueError("`replicate` must be left out with `mesh`: pass a 2-D mesh instead")
        for name, one in (*model.named_parameters(), *model.named_buffers()):
            if one.is_meta and settings.world.is_main:
                msg = f"rank 0 must build `model` without torch.device('meta'), but `{name}` is "
                msg += "empty: or call fully_shard and to_empty(device=…) first, and load_weights "
                msg += "after"
                raise ValueError(msg)

    def facts(self, model: nn.Module, settings: WrapOptions) -> Facts:
        found = Counter(type(block).__name__ for block in _blocks(unwrap(model), settings))
        return {"the blocks": dict(found)}

    def wrap(self, model: nn.Module, settings: WrapOptions) -> nn.Module:
        fully_shard: Any = self.options_of()
        target = checked_device(self.device(settings))
        # The module inside torch.compile, as PyTorch advises, so that names and hooks are the
        # module's.
        module = unwrap(model)
        given = {k: v for k, v in settings.options.items() if k not in self.extra_options}
        options: dict[str, Any] = {"mesh": _mesh(target, settings), **given}
        ignored = options.get("ignored_params") or set()
        blocks = _blocks(module, settings)
        if not blocks:
            _warn_of_root_alone(module, settings)
        for parameter in module.parameters():
            setattr(parameter, _OLD, True)
        # Only ignored parameters, because it keeps tensors in memory.
        made: dict[Tensor, Tensor] = {}
        for part in (*blocks, module):  # one by one, so a device holds at most one unsharded block
            moved = fsdp_utils.materialize(part, target)
            made |= {old: new for old, new in moved.items() if old in ignored}
            # fully_shard shards each rank's weights, and does not broadcast rank 0's, as DDP does.
            broadcast_weights(part)
            if ignored:
                options["ignored_params"] = {made.get(one, one) for one in ignored}
            fully_shard(part, **options)
            if torch.__version__ < "2.12":
                part.register_forward_hook(_refuse_dataclass)
        for parameter in module.parameters():
            vars(parameter).pop(_OLD, None)
        _watch()
        module.register_forward_hook(fsdp_utils.reshard_hook)
        if settings.world.size > 1:
            module.register_forward_hook(_broadcast_buffers)
            vars(module)[_EQUAL] = True
        return model

    load = staticmethod(load_sharded)


def _blocks(module: nn.Module, settings: WrapOptions) -> list[nn.Module]:
    """Return the blocks to shard before the root, except those that are sharded already."""
    wanted = settings.options.get("blocks")
    found = [] if wanted is None else blocks_of(module, wanted)
    return [block for block in found if not isinstance(block, ShardedModule)]


def _mesh(device: torch.device, settings: WrapOptions) -> Any:
    """Return the device mesh; with replicas, the shard groups are neighbors, on one node."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: PLC0415  # half a second

    # Initializes the device; otherwise PyTorch would make another one current.
    torch.zeros(1, device=device)
    size, replicas = settings.world.size, int(settings.options.get("replicate", 1))
    world: Any = dist.group.WORLD
    if replicas == 1:
        return DeviceMesh.from_group(world, device.type)  # reuses the default group
    names = ("replicate", "shard")
    # PyTorch would split a bound group, which few backends support.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        return init_device_mesh(device.type, (replicas, size // replicas), mesh_dim_names=names)
    finally:
        world.bound_device_id = bound


def _warn_of_root_alone(module: nn.Module, settings: WrapOptions) -> None:
    """Warn of the memory that a large model without blocks takes."""
    if size_of(module) <= _LARGE or any(isinstance(m, ShardedModule) for m in module.modules()):
        return
    kind = getattr(settings.options.get("mp_policy"), "param_dtype", None)
    peak = sum(p.numel() * (kind or p.dtype).itemsize for p in module.parameters())
    text = "%s is sharded at its root alone: a rank holds all %.2f GB at once; pass blocks='auto'"
    _log.warning(text, type(module).__name__, peak / 1e9, ranks=[0], once=True)


# As all hooks in this file: each model would count against dynamo's limit of recompilations.
@uncompiled
def _refuse_dataclass(module: nn.Module, _args: object, output: object) -> None:
    """Forward hook: raise for a dataclass output, whose tensors FSDP misses before torch 2.12."""
    kinds = (type(leaf).__name__ for _, leaf in leaves_with_path(output) if is_dataclass(leaf))
    if torch.is_grad_enabled() and (kind := next(kinds, None)) is not None:
        msg = f"{type(module).__name__} must return a dict, not dataclass {kind}, before torch 2.12"
        raise TypeError(msg)


@uncompiled
def _broadcast_buffers(module: nn.Module, _args: object, _output: object) -> None:
    """Forward hook: broadcast rank 0's buffers after a training forward outside of `backward`."""
    trained = active_model()
    communicates = torch.is_grad_enabled() if trained is None else trained is not module
    if communicates and module.training:
        uneven_shares.warn()
        broadcast_coalesced(module.buffers())


def _look(one: torch.optim.Optimizer, *_: object) -> None:
    """Raise in the step of an optimizer that has replaced parameters."""
    parameters = [parameter for group in one.param_groups for parameter in group["params"]]
    if stale := sum(hasattr(parameter, _OLD) for parameter in parameters):
        msg = f"{type(one).__name__} has {stale} parameters from before wrap_model: make it after"
        raise RuntimeError(msg)


# Registers the check of optimizers before their steps, once for a process.
_watch = cache(lambda: register_optimizer_step_pre_hook(_look))

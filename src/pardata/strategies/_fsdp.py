"""Strategy "fsdp": PyTorch's fully_shard, with equal buffers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from pardata.data._uneven_shares import uneven_shares
from pardata.model._before import AsFound
from pardata.model._buffers import average, broadcast, real_buffers
from pardata.model._sharding import forget_step, reshard, shard_again
from pardata.model._state_dict import load_sharded
from pardata.model._unwrap import ShardedModule, unwrap
from pardata.step._count import Piece
from pardata.step._guests import Guests, role_of
from pardata.step._step import Replica, SharedStep
from pardata.strategies._old_optimizers import refuse_old_optimizers
from pardata.strategies._strategy import Settings, Strategy, broadcast_weights


class FsdpStep(SharedStep):
    """Strategy "fsdp": every forward and backward is collective, so all ranks run equally many."""

    equally_many = True

    def __init__(self, replica: Replica, scaler: GradScaler | None, batch: Any) -> None:
        layer = replica.layer
        if not hasattr(layer, "set_requires_gradient_sync"):
            raise TypeError(
                f"`model` must be sharded by fully_shard, but is in FSDP's older wrapper, "
                f"{type(layer).__name__}: pass what wrap_model(model, 'fsdp') returned"
            )
        super().__init__(replica, scaler, batch)
        # What a forward without a backward has left, as of an evaluation without no_grad().
        reshard(layer)
        for name, parameter in layer.named_parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is None and parameter.requires_grad:
                raise RuntimeError(
                    f"each trained parameter must be sharded under 'fsdp', but `{name}` is not, so "
                    f"that no rank would synchronise it: build the model with it, wrap that, and "
                    f"call load_weights(new, old.state_dict(), strict=False)"
                )
            if mesh is not None and mesh.size() != self.size:
                raise ValueError(
                    f"the model must be sharded over all {self.size} ranks, but is so over "
                    f"{mesh.size()}: give fully_shard a mesh of all ranks"
                )

    @contextmanager
    def whole(self) -> Iterator[None]:
        with AsFound(self.module):
            try:
                with Guests(self.layer):
                    yield
                    self._settle()
                    if self.size > 1:
                        _average_buffers(self.layer, self.tally.count, self.tally.total)
            except BaseException:
                forget_step(self.layer)  # also what was in .grad before: that is put back next
                raise

    @contextmanager
    def around(self, piece: Piece) -> Iterator[None]:
        self.layer.set_requires_gradient_sync(piece is self.pieces.own[-1])
        try:
            yield
        finally:
            self.layer.set_requires_gradient_sync(True)


class FsdpStrategy(Strategy):
    name = "fsdp"
    step = FsdpStep
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
        broadcast_weights(model)
        # Inside torch.compile, as PyTorch advises: names and hooks are then those of the module.
        size, module = settings.here.size, unwrap(model)
        mesh = init_device_mesh(kind, (size,))
        before = [ref(parameter) for parameter in module.parameters()]
        self.options_of()(module, **{"mesh": mesh, **settings.options})
        refuse_old_optimizers(module, before)
        module.register_forward_pre_hook(_note_guest, prepend=True)
        module.register_forward_hook(shard_again)
        if size > 1:
            module.register_forward_hook(_equal_buffers)
        return model

    load = staticmethod(load_sharded)


def _note_guest(module: nn.Module, _args: object) -> None:
    """Let the step of another model know of this one, before it gathers: a forward pre-hook."""
    role_of(module, lambda: broadcast(module.buffers()))


def _equal_buffers(module: nn.Module, _args: object, _output: object) -> None:
    """Broadcast rank 0's buffers after a training forward: a forward hook."""
    role = role_of(module, lambda: None)  # a guest is known from the hook above
    if role == "alone" and module.training and torch.is_grad_enabled():
        uneven_shares.warn()
        broadcast(module.buffers())


def _average_buffers(module: nn.Module, count: int, total: float | Tensor) -> None:
    """Take the mean of the buffers of a module that has the hook above, after a step. Collective.

    Args:
        module: which the step has trained.
        count: how much this rank's buffers count.
        total: how much those of all ranks.
    """
    hooks = module._forward_hooks.values()  # noqa: SLF001  # torch has no public name
    if _equal_buffers in hooks and module.training:
        average(real_buffers(module).values(), count, total)

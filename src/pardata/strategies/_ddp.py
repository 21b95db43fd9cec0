"""Strategy "ddp": a transparent DistributedDataParallel that keeps buffers equal."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from types import MethodType
from typing import Any, Never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel

from pardata.data._batch import iter_tensors, uneven_shares
from pardata.model._grads_and_buffers import StashedGradients, broadcast_coalesced
from pardata.model._replica_state import CHECK_EVERY, ReplicaState
from pardata.model._torch_internals import at_end_of_backward, parameters_of, uncompiled
from pardata.model._transparent import TransparentWrapper, forbid_unsynced_forward
from pardata.strategies import _ddp_reducer as reducer
from pardata.strategies._forward import active_model, active_step, check_nested, running_step
from pardata.strategies._loss_weights import Microbatch
from pardata.strategies._step import DistributedStep
from pardata.strategies._strategy import Strategy, WrapOptions

# ruff: noqa: SLF001  # overridden methods of DDP with private names, and our own


class TransparentDDP(TransparentWrapper, DistributedDataParallel):
    """`DistributedDataParallel` that is transparent, with equal buffers after every step."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        # By `__dict__`, because attributes now belong to the module.
        self.__dict__.update(_forward_runs=False, _expects_backward=False)
        if options.get("init_sync", True):
            self._broadcast_buffers()  # torch before 2.13 does not without `broadcast_buffers`

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; the backward of a synchronized training forward broadcasts the buffers.

        PyTorch broadcasts them before the *next* forward, so ranks differ in between, and an
        evaluation communicates.
        """
        trained = active_model()
        if trained not in (None, self):
            check_nested(self.module)
            return self.module(*inputs, **kwargs)
        is_bare = trained is None  # not inside `backward`
        if is_bare and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._reduced.check(self)
        self.__dict__["_forward_runs"] = True
        try:
            output = super().forward(*inputs, **kwargs)
        finally:
            self.__dict__["_forward_runs"] = False
        if is_bare and torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.__dict__["_expects_backward"] = True
            if self._inside.training:
                uneven_shares.warn()
            compiles = torch.compiler.is_compiling()
            # In the backward, because a single rank may run a forward, but not a backward.
            if self._has_unequal_buffers():
                _after_backward(() if compiles else iter_tensors(output), self._broadcast_buffers)
            is_early = not compiles and ReplicaState.of(self).step < CHECK_EVERY
            if is_early and 1 < self.process_group.size() == dist.get_world_size():
                # After the final callback of PyTorch's reducer, which is queued by then.
                later = partial(at_end_of_backward, self._compare_replicas)
                _after_backward(iter_tensors(output), later, otherwise=False)
        return output

    @uncompiled
    def _compare_replicas(self) -> None:
        """Compare the replicas after a ``loss.backward()``. Collective in some of them."""
        state = ReplicaState.of(self)
        state.step += 1
        if state.is_due:
            state.compare("loss.backward")

    def _has_unequal_buffers(self) -> bool:
        # By the module's mode, because unwrap(model).train() does not set the wrapper's.
        may_differ = self.broadcast_buffers and self._inside.training
        return may_differ and next(self.module.buffers(), None) is not None

    def will_sync_module_buffers(self) -> bool:
        """Return False, so that PyTorch does not broadcast the buffers before a forward."""
        return False

    def join_hook(self, **_: Any) -> Never:
        """Raise for ``join()``, in which finished ranks would not broadcast the buffers."""
        raise RuntimeError(
            "`join()` must not be used after wrap_model: make_loader gives all ranks as many steps"
        )

    @cached_property
    def _payload(self) -> reducer.Payload | None:
        return reducer.payload_for(self)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        # The first two belong to the reducer, which is created anew. PyTorch's __setstate__ sets
        # attributes of the wrapper.
        for name in ("_payload", "_reduced", "_transparent"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["_transparent"] = True

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()
        self.__dict__["_reduced"] = reducer.ReducedParameters(self, parameters, sparse)
        return parameters, sparse

    @uncompiled
    def _broadcast_buffers(self) -> None:
        ignored = self.parameters_to_ignore
        buffers = (b for name, b in self.module.named_buffers() if name not in ignored)
        broadcast_coalesced(buffers, self.process_group)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, MethodType) and value.__self__ is self._inside:
            return forbid_unsynced_forward(self, name)(value)
        return value


class HookedDDP(TransparentDDP):
    """A DDP whose buckets are reduced by the step that runs: by its method `reduce`."""

    def _ddp_init_helper(self, *args: Any) -> None:
        super()._ddp_init_helper(*args)
        reducer.register_hook(self, None, _reduce)

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # Without PyTorch's context, in which dynamo splits the module, and changes its kernels.
        return self.module(*inputs, **kwargs)

    def _has_unequal_buffers(self) -> bool:
        return False  # a step sets them


def _reduce(_state: object, bucket: dist.GradBucket) -> Any:
    """Communication hook: call the method of the step."""
    return running_step().reduce(bucket)


def _after_backward(
    outputs: Iterable[Tensor], action: Callable[[], None], *, otherwise: bool = True
) -> None:
    """Run `action` at the end of each backward through any of `outputs`.

    If no output requires a gradient, run it at once, or never without `otherwise`.
    """
    ends = [tensor for tensor in outputs if tensor.requires_grad]
    if ends:
        register_multi_grad_hook(ends, lambda _: at_end_of_backward(action), mode="any")
    elif otherwise:
        action()


class DdpStep(DistributedStep):
    """Step of "ddp": every rank runs at least one microbatch, and DDP reduces in the last one."""

    min_microbatches = 1
    _payload: reducer.Payload | None = None

    def _prepare(self) -> None:
        if not self.layer.require_backward_grad_sync:
            raise ValueError(
                "`backward` must run without no_sync(): pass microbatch_size to make_loader instead"
            )
        super()._prepare()
        self._is_transparent = isinstance(self.layer, TransparentDDP)  # not for PyTorch's class

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        views = getattr(self.layer, "gradient_as_bucket_view", False)
        with StashedGradients(parameters_of(self.module), shares_memory=views), active_step(self):
            self._begin()
            try:
                yield
                self._finish()
            except BaseException:
                self._reset()
                raise
            self._take_means()

    def _begin(self) -> None:
        """Arrange DDP's buckets, and check that it reduces all trained parameters."""
        if self.loss_weights.most > 1 and self.layer.static_graph:
            raise ValueError(
                f"`static_graph` must be False for {self.loss_weights.most} microbatches on a rank"
            )
        # PyTorch does this in the next forward. A rank may fail before that.
        self._arrange_buckets()
        if self._is_transparent:
            self.layer._reduced.check(self.layer)
        if vars(self.layer).pop("_expects_backward", False) and self.loss_weights.most > 1:
            # After a forward without a backward, as in an evaluation without no_grad(), PyTorch
            # would reduce in the next backward even under no_sync(), and perhaps not on every rank.
            reducer.reset_reducer(self.layer)

    def _arrange_buckets(self) -> None:
        """Arrange DDP's buckets in the order of gradients, once. Collective."""
        if self.layer.reducer._rebuild_buckets():
            self.layer._has_rebuilt_buckets = True

    def _reset(self) -> None:
        """Reset DDP after an error, which every rank raises."""
        reducer.renew_reducer(self.layer)

    def _finish(self) -> None:
        """Raise unless all gradients were reduced."""
        try:  # before the next collective, which would mix with reductions on other ranks
            self.layer._check_reducer_finalized()
        except RuntimeError as error:
            trained = ((n, p) for n, p in self.module.named_parameters() if p.requires_grad)
            unused = ", ".join(f"`{name}`" for name, p in trained if p.grad is None)
            msg = f"every parameter must take part in the loss, but {unused or 'some'} did not: "
            msg += "use it, freeze it (requires_grad_(False)), or pass find_unused_parameters=True"
            raise RuntimeError(msg) from error
        if vars(self.layer).get("_stays_arranged"):
            reducer.reset_reducer(self.layer)

    def microbatch(self, microbatch: Microbatch) -> AbstractContextManager[None]:
        last = microbatch is self.loss_weights.microbatches[-1]
        context: AbstractContextManager[None] = nullcontext() if last else self.layer.no_sync()
        return context

    def send(self) -> None:
        if self.size > 1:  # a model in PyTorch's class has no payload
            self._payload = getattr(self.layer, "_payload", None)
        if self._payload is not None:
            self._payload.numbers = self.metrics.message(self.size)

    def _sums(self) -> Tensor:
        return super()._sums() if self._payload is None else self._payload.sums()

    def _take_means(self) -> None:
        if self._is_transparent and self.layer._has_unequal_buffers():
            self.layer._broadcast_buffers()
        super()._take_means()


class DdpStrategy(Strategy):
    name = "ddp"
    step = DdpStep
    wrapper: type = DistributedDataParallel
    replicated: type[TransparentDDP] = TransparentDDP
    takes_devices = True

    def wrap(self, model: nn.Module, settings: WrapOptions) -> nn.Module:
        options = dict(settings.options)
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) == 1 and (only := devices.pop()).type != "cpu":
            options.setdefault("device_ids", [only])
        return self.replicated(model, **options)

"""Strategy "exact": training with the same bits at every world size.

Does not keep the bits between different kernels: processors, torch versions, numbers of threads.
Several processes train in a DDP whose communication hook sums gradients in a fixed order.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed import GradBucket
from torch.futures import Future

from pardata._validation import check_int
from pardata.data._batch import iter_tensors
from pardata.environment._device import checked_device
from pardata.model._torch_internals import sync_batch_norms, uncompiled, versions_of
from pardata.model._transparent import TransparentWrapper
from pardata.model._unwrap import Wrapper
from pardata.store._round import Facts
from pardata.strategies import _ddp_reducer as reducer
from pardata.strategies._ddp import DdpStrategy, TransparentDDP
from pardata.strategies._forward import active_model, check_nested, running_step
from pardata.strategies._strategy import WrapOptions, broadcast_weights
from pardata.strategies.exact._exact_step import ExactStep
from pardata.strategies.exact._numerics import numerics_error, numerics_record

# ruff: noqa: SLF001  # overridden methods of DDP with private names, and our own

# Each step gets new buckets, and ``.grad`` is a part of them. So gradients need not be copied back,
# and those of earlier steps keep their values.
_NEW_BUCKETS = {"gradient_as_bucket_view": True, "lazy_bucket_allocation": True}

_RECORD = "exact"  # the key of the record in the metadata of a state dict


class ExactModel(TransparentWrapper):
    """The base class of wrappers of a module whose gradients only `pardata.backward` sets."""

    _threads: int  # of PyTorch's CPU kernels, on which sums depend

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; outside of a step of `backward`, a backward of its outputs raises."""
        active = active_model()
        if active is self:
            return super().forward(*inputs, **kwargs)
        if active is not None:
            check_nested(self.module)
        output = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            _forbid_backward(self.module, output)
        return output

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state dict, with a record of the numerics in its metadata."""
        state = super().state_dict(*args, **kwargs)
        metadata = versions_of(state)
        if metadata:
            # With a prefix if this is a child of the module whose state is taken.
            path = (args[1] if len(args) > 1 else kwargs.get("prefix", ""))[:-1]
            device = next(self.parameters()).device
            metadata[path] = {**metadata.get(path, {}), _RECORD: numerics_record(device)}
        return state

    def check_versions(self, facts: Mapping[str, Any]) -> None:
        """Raise for weights of an exact run with other numerics, because the bits would differ."""
        then = facts.get(_RECORD)
        if then is None:
            return
        now = numerics_record(next(self.parameters()).device)
        if differ := [name for name in now if then.get(name) != now[name]]:
            diff = ", ".join(f"{key} was {then.get(key)!r} and is {now[key]!r}" for key in differ)
            raise ValueError(
                f"an exact run must keep its kernels, but {diff}: resume where it began, with its "
                f"threads=… and precisions, or load into unwrap(model) for a run that is not exact"
            )


class ExactModule(ExactModel, Wrapper):
    """The wrapper in a single process.

    Args:
        module: the module to train.
        threads: number of threads of PyTorch's CPU kernels. It is set for the whole process.
        bucket_cap_mb: as in DDP, for several processes.
    """

    def __init__(
        self, module: nn.Module, *, threads: int = 1, bucket_cap_mb: float | None = None
    ) -> None:
        super().__init__(module)
        self._threads = threads


class ExactDDP(ExactModel, TransparentDDP):
    """The wrapper in several processes: a `DistributedDataParallel` with a communication hook."""

    def __init__(self, module: nn.Module, *, threads: int = 1, **options: Any) -> None:
        new_buckets = _NEW_BUCKETS if torch.__version__ >= "2.15" else {}
        # PyTorch would broadcast complex weights, which gloo cannot.
        super().__init__(module, init_sync=False, **new_buckets, **options)
        self._threads = threads

    def _ddp_init_helper(self, *args: Any) -> None:
        super()._ddp_init_helper(*args)
        reducer.register_hook(self, None, _reduce)

    def _renew_if_changed(self, trained: list[nn.Parameter]) -> None:
        """Give DDP new buckets if it was built for other parameters, or other layouts."""
        if not self._reduced.are(trained):
            reducer.renew_reducer(self, as_built=False)

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # Without PyTorch's context, in which dynamo splits the module, and changes its kernels.
        return self.module(*inputs, **kwargs)

    def _has_unequal_buffers(self) -> bool:
        return False  # a step sets them


def _reduce(_state: object, bucket: GradBucket) -> Future[Tensor]:
    """Communication hook: sum a bucket in the order of the tree."""
    return running_step().reduce(bucket)


@uncompiled
def _forbid_backward(module: nn.Module, output: object) -> None:
    """Raise in a backward of the outputs of a module, if it would train it."""

    def refuse(_gradient: Tensor) -> None:
        msg = "under strategy 'exact' only `pardata.backward` must run a backward, but "
        msg += f"{type(module).__name__} got another gradient: call backward(model, loss_fn, "
        msg += "batch), or unwrap(model) for gradients of inputs"
        raise RuntimeError(msg)

    ends = [tensor for tensor in iter_tensors(output) if tensor.requires_grad]
    if ends and any(parameter.requires_grad for parameter in module.parameters()):
        register_multi_grad_hook(ends, refuse, mode="any")


class ExactStrategy(DdpStrategy):
    name = "exact"
    step = ExactStep
    wrapper = ExactModel
    needs_group = takes_devices = False

    def check(self, model: nn.Module, settings: WrapOptions) -> None:
        if settings.sync_batchnorm or sync_batch_norms(model):
            msg = "`sync_batchnorm` must be False under strategy 'exact': make the model without it"
            raise ValueError(msg)
        for name, part in model.named_modules():
            if getattr(part, "sparse", False):
                msg = f"gradients must be dense under 'exact', but `{name or 'model'}` has "
                msg += "sparse=True: leave it out"
                raise ValueError(msg)
        check_int("threads", settings.options.get("threads", 1), least=1)

    def facts(self, model: nn.Module, settings: WrapOptions) -> Facts:
        threads, device = settings.options.get("threads", 1), checked_device(self.device(settings))
        torch.set_num_threads(threads if device.type == "cpu" else torch.get_num_threads())
        if refusal := numerics_error(model, threads):
            raise refusal
        return numerics_record(device)

    def options_of(self) -> Callable[..., object]:
        return ExactModule

    def wrap(self, model: nn.Module, settings: WrapOptions) -> nn.Module:
        if settings.world.size == 1:
            return ExactModule(model, **settings.options)
        broadcast_weights(model)
        return super().wrap(model, settings)

    def replicate(self, model: nn.Module, **options: Any) -> nn.Module:
        return ExactDDP(model, **options)

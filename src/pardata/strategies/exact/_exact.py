"""Strategy "exact": training with the same bits at every world size.

Does not keep the bits between different kernels: processors, torch versions, numbers of threads.
Several processes train in a DDP whose communication hook sums gradients in a fixed order.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from pardata._validation import check_int
from pardata.environment._device import checked_device
from pardata.model._torch_internals import sync_batch_norms, versions_of
from pardata.model._transparent import TransparentWrapper
from pardata.model._unwrap import Wrapper, unwrap
from pardata.store._round import Facts
from pardata.strategies._ddp import DdpStrategy, HookedDDP
from pardata.strategies._forward import active_model, check_nested
from pardata.strategies._strategy import WrapOptions, broadcast_weights
from pardata.strategies.exact._exact_step import ExactStep
from pardata.strategies.exact._gradient_guard import GradientGuard
from pardata.strategies.exact._numerics import numerics_error, numerics_record

# Each step gets new buckets, and ``.grad`` is a part of them. So gradients need not be copied back,
# and those of earlier steps keep their values.
_NEW_BUCKETS = {"gradient_as_bucket_view": True, "lazy_bucket_allocation": True}

_RECORD = "exact"  # the key of the record in the metadata of a state dict


class ExactModel(TransparentWrapper):
    """The base class of wrappers of a module whose gradients only `pardata.backward` sets.

    Args:
        module: the module to train.
        threads: the number of threads of PyTorch's CPU kernels, on which sums depend.
    """

    def __init__(self, module: nn.Module, *, threads: int = 1, **options: Any) -> None:
        super().__init__(module, **options)
        self._threads, self._guard = threads, GradientGuard(unwrap(module))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; in a step of another model it must change no buffer."""
        active = active_model()
        if active is self:
            return super().forward(*inputs, **kwargs)
        if active is not None:
            check_nested(self.module)
        return self.module(*inputs, **kwargs)

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
    """The wrapper in a single process, in which DDP's `bucket_cap_mb` has no effect."""

    def __init__(
        self, module: nn.Module, *, threads: int = 1, bucket_cap_mb: float | None = None
    ) -> None:
        super().__init__(module, threads=threads)


class ExactDDP(ExactModel, HookedDDP):
    """The wrapper in several processes: a `DistributedDataParallel` with a communication hook."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        new_buckets = _NEW_BUCKETS if torch.__version__ >= "2.15" else {}
        # PyTorch would broadcast complex weights, which gloo cannot.
        super().__init__(module, init_sync=False, **new_buckets, **options)


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

"""Strategy "exact": training that is bitwise identical at every world size.

Does not keep the bits between different kernels: processors, torch versions, numbers of threads.
Several processes train in a DDP whose communication hook sums gradients in a fixed order.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

from pardata._validation import check_int
from pardata.environment._device import checked_device
from pardata.model._torch_internals import name_of, parameters_of, sync_batch_norms, versions_of
from pardata.model._transparent import TransparentWrapper
from pardata.model._unwrap import Versioned, Wrapper, unwrap
from pardata.store._round import Facts
from pardata.strategies._ddp import DdpStrategy, HookedDDP
from pardata.strategies._forward import active_model, check_nested, running_step
from pardata.strategies._strategy import WrapOptions, broadcast_weights
from pardata.strategies.exact._exact_step import ExactStep
from pardata.strategies.exact._numerics import numerics_error, numerics_record

# Each step gets new buckets, and ``.grad`` is a part of them. So gradients need not be copied back,
# and those of earlier steps keep their values.
_NEW_BUCKETS = {"gradient_as_bucket_view": True, "lazy_bucket_allocation": True}

_RECORD = "exact"  # the key of the record in the metadata of a state dict


class GradientGuard:
    """Raises in a backward that is not of a step. Its copies have hooks on the copied parameters.

    Args:
        module: the module whose parameters get hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._hooked = set[nn.Parameter]()
        self.extend()

    def __reduce__(self) -> tuple[object, ...]:
        return GradientGuard, (self.module,)

    def extend(self) -> None:
        """Register a hook on each new parameter, also on frozen ones: they may be trained later."""
        for parameter in parameters_of(self.module):
            can_be_trained = parameter.is_floating_point() or parameter.is_complex()
            if can_be_trained and parameter not in self._hooked and not parameter.is_inference():
                trained = parameter.requires_grad
                # Weak, because the parameter may outlive its wrapper.
                hook = partial(_check_step, ref(self))
                parameter.requires_grad_().register_post_accumulate_grad_hook(hook)
                parameter.requires_grad_(trained)
                self._hooked.add(parameter)


def _check_step(guarded_by: "ref[GradientGuard]", parameter: nn.Parameter) -> None:
    """Raise unless the step that runs now trains the parameter."""
    guard, step = guarded_by(), running_step()
    if guard is None or parameter in getattr(step, "trained", ()):
        return
    parameter.grad = None  # it is not reduced, and a later `backward` would add to it
    name = name_of(parameter, guard.module.named_parameters())
    if step is not None and step.module is guard.module:
        msg = f"what is trained must not change in a step of 'exact', but `{name}` did: call "
        msg += "requires_grad_() before backward"
    else:
        msg = f"under strategy 'exact' only `pardata.backward` must run a backward, but `{name}` "
        msg += "got another gradient: call backward(model, loss_fn, batch)"
    raise RuntimeError(msg)


class ExactModel(Versioned, TransparentWrapper):
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
    """The wrapper in a single process."""


class ExactDDP(ExactModel, HookedDDP):
    """The wrapper in several processes: a `DistributedDataParallel` with a communication hook."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        # On a CPU small buckets are sent early, and take little memory at a time.
        ours = {"bucket_cap_mb": 4} if next(module.parameters()).is_cpu else {}
        ours |= _NEW_BUCKETS if torch.__version__ >= "2.15" else {}
        # PyTorch would broadcast complex weights, which gloo cannot.
        super().__init__(module, init_sync=False, **{**ours, **options})


class ExactStrategy(DdpStrategy):
    name = "exact"
    step = ExactStep
    wrapper = ExactModel
    replicated = ExactDDP
    extra_options = frozenset({"bucket_cap_mb"})
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

    def wrap(self, model: nn.Module, settings: WrapOptions) -> nn.Module:
        if settings.world.size == 1:
            return ExactModule(model, threads=settings.options.get("threads", 1))
        broadcast_weights(model)
        return super().wrap(model, settings)

"""Strategy "exact": training that is the same to the last bit on any number of processes.

Only `backward` fills the gradients: a hook on every parameter hands each microbatch's gradient on
to be summed in fixed point (`_exact_step`), and refuses any other backward.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pardata.model._arithmetic import probe
from pardata.model._read_through import ReadThrough
from pardata.model._unwrap import Wrapper, unwrap

_RECORD = "exact"  # in the metadata of a state dict
# Options of torch.compile that choose kernels by their speed.
_TIMED = "max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning"


class ExactModel(ReadThrough, Wrapper):
    """A module whose gradients only `pardata.backward` makes.

    Args:
        module: to train.
        threads: of PyTorch's kernels on the CPU, whose sums depend on their number. It is set for
            the whole process.
        on_overflow: what a gradient that is infinite, NaN or beyond 2**46 leads to: ``"raise"`` an
            error, or ``"skip"``: a warning, and a step that leaves gradients and buffers alone.

    Attributes:
        exact: what `backward` asks of this wrapper.
    """

    exact: "Exactness"

    def __init__(self, module: nn.Module, *, threads: int = 1, on_overflow: str = "raise") -> None:
        # Not as attributes are set, which are the module's once it is wrapped.
        self.__dict__["exact"] = Exactness(unwrap(module), threads, on_overflow)
        super().__init__(module)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        try:
            return self.module(*inputs, **kwargs)
        except Exception as error:
            self._name_empty_share(error, (inputs, kwargs))
            raise

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module inside, and in its metadata what decides the last bit."""
        state = super().state_dict(*args, **kwargs)
        metadata = getattr(state, "_metadata", None)
        if metadata is not None:
            # With a prefix where this is a child of the module that is asked.
            path = (args[1] if len(args) > 1 else kwargs.get("prefix", ""))[:-1]
            metadata[path] = {**metadata.get(path, {}), _RECORD: kernels(self)}
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse weights of an exact run whose kernels were others: this would be another run."""
        for facts in getattr(state, "_metadata", {}).values():
            self._check_record(facts)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kw: Any) -> None:
        self._check_record(args[0])
        super()._load_from_state_dict(state_dict, prefix, *args, **kw)

    def _check_record(self, facts: Mapping[str, Any]) -> None:
        then = facts.get(_RECORD)
        if then is None:
            return
        now = kernels(self)
        if differ := [name for name in now if then.get(name) != now[name]]:
            told = ", ".join(f"{key} was {then.get(key)!r} and is {now[key]!r}" for key in differ)
            raise ValueError(
                f"an exact run must keep the kernels that it began with, but {told}: resume "
                f"where it began (threads: wrap_model(..., threads=…)) and with its precisions, "
                f"or load into unwrap(model), for a run that is no longer the same to the last bit"
            )


class Exactness:
    """What a step asks of an exact model: its options, its gradients, and room between steps.

    Attributes:
        module: whose parameters are hooked.
        threads: as `ExactModel` was given them.
        on_overflow: likewise.
        receive: is handed each parameter as soon as it has got a gradient; None while no
            microbatch is run.
        scratch: memory that a step leaves to the next. Neither copied nor pickled, as the hooks.
    """

    def __init__(self, module: nn.Module, threads: int, on_overflow: str) -> None:
        self.module = module
        self.threads = threads
        self.on_overflow = on_overflow
        self.receive: Callable[[nn.Parameter], None] | None = None
        self.scratch: list[Tensor] = []
        self._hooked: set[nn.Parameter] = set()
        self.hook_parameters()

    def __reduce__(self) -> tuple[Any, ...]:
        return Exactness, (self.module, self.threads, self.on_overflow)

    def hook_parameters(self) -> None:
        """Hook every parameter that is not yet, frozen ones too: they may be trained later."""
        for parameter in self.module.parameters():
            can_be_trained = parameter.is_floating_point() or parameter.is_complex()
            if can_be_trained and parameter not in self._hooked and not parameter.is_inference():
                trained = parameter.requires_grad
                parameter.requires_grad_().register_post_accumulate_grad_hook(_Hook(self))
                parameter.requires_grad_(trained)
                self._hooked.add(parameter)


class _Hook:
    """Hands a gradient on to the step that is run, and refuses it where none is."""

    def __init__(self, exact: Exactness) -> None:
        self.exact = weakref.ref(exact)  # for the parameter may outlive its wrapper

    def __call__(self, parameter: Any) -> None:
        exact = self.exact()
        if exact is not None and exact.receive is not None:
            exact.receive(parameter)
        elif exact is not None and not _is_received(parameter):
            parameter.grad = None  # of this rank alone: a later `backward` would add to it
            named = exact.module.named_parameters()
            name = next((name for name, p in named if p is parameter), "a former parameter")
            raise RuntimeError(
                f"under strategy 'exact' only `pardata.backward` must run a backward, but "
                f"`{name}` got a gradient from another: call backward(model, loss_fn, batch) in "
                f"place of loss.backward()"
            )


def _is_received(parameter: nn.Parameter) -> bool:
    """Whether another wrapper of the same parameter runs a step: a model may be wrapped again."""
    hooks: Any = parameter._post_accumulate_grad_hooks  # noqa: SLF001  # torch has no public name
    wrappers = [hook.exact() for hook in hooks.values() if isinstance(hook, _Hook)]
    return any(exact is not None and exact.receive is not None for exact in wrappers)


def kernels(model: nn.Module) -> dict[str, object]:
    """Return what decides the last bit of a kernel's result, except its input."""
    device, cpu = next(model.parameters()).device, torch.backends.cpu.get_cpu_capability()
    return {
        "the number of threads": torch.get_num_threads(),
        "torch": str(torch.__version__),  # a class of its own, which compares in its own way
        "the processor": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "a probe of its arithmetic": probe(device)[:16],
    }


def refused_kernels(model: nn.Module, threads: int) -> RuntimeError | None:
    """Return why a process may not compute with `model` and so many threads, if it may not.

    Of a compiled model dynamo is told to fail at its limit of recompilations. Past it, it would run
    uncompiled what it has not met: on each rank other sizes. That is for the whole process, as an
    evaluation counts as well.
    """
    if any("dynamo_ctx" in part.__dict__ for part in model.modules()):
        config = torch._dynamo.config  # noqa: SLF001  # torch has no public name
        new, old = "fail_on_recompile_limit_hit", "fail_on_cache_limit_hit"  # that of torch 2.6
        setattr(config, new if hasattr(config, new) else old, True)
    texts = (*_wrong_settings(model, threads), *_wrong_compilations(model))
    return RuntimeError(f"under strategy 'exact' {texts[0]}") if texts else None


def _wrong_settings(model: nn.Module, threads: int) -> Iterator[str]:
    """Yield what lets kernels be chosen by their speed, or in other ways that no probe sees."""
    if torch.backends.cudnn.benchmark:
        yield "torch.backends.cudnn.benchmark must be False, but is True: set it to False"
    is_on = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if (only_warns or not is_on) and any(parameter.is_cuda for parameter in model.parameters()):
        yield (
            f"a GPU must have deterministic algorithms, but they are "
            f"{'only warned of (warn_only=True)' if is_on else 'off'}: call "
            f"seed_everything(seed, deterministic=True), before anything runs there"
        )
    if (now := torch.get_num_threads()) != threads:
        yield (
            f"PyTorch must keep its {threads} thread(s), but now has {now}: leave "
            f"torch.set_num_threads alone, or wrap with threads={now} from the beginning"
        )


def _wrong_compilations(model: nn.Module) -> Iterator[str]:
    """Yield how a part of the model was compiled so that others may get other kernels."""
    for part in model.modules():
        context = part.__dict__.get("dynamo_ctx")
        options = getattr(context, "compiler_config", None) or {}
        timed = [name for name in _TIMED if options.get(name) and not options.get("deterministic")]
        if part._compiled_call_impl is not None:  # noqa: SLF001  # torch has no public name
            how = "in place, where that cannot be seen"
        elif context is not None and getattr(context, "_dynamic", None) is not False:
            how = "without it, so that kernels may depend on the sizes that came before"
        elif timed:
            how = f"with {timed[0]}, so that kernels are chosen by their speed"
        else:
            continue
        yield (
            f"a model must be compiled with dynamic=False and not be tuned, but a "
            f"{type(unwrap(part)).__name__} was compiled {how}: pass torch.compile(model, "
            f"dynamic=False), without mode='max-autotune'"
        )

"""Hooks on parameters, which tell that a gradient is there."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from pardata.model._before import walked


class Exactness:
    """What a step asks of an exact model: its options and its gradients.

    Attributes:
        module: whose parameters are hooked.
        threads: as `ExactModel` was given them.
        receive: is handed each parameter as soon as it has got a gradient; None while no
            microbatch is run. Neither copied nor pickled, as the hooks.
    """

    def __init__(self, module: nn.Module, threads: int) -> None:
        self.module = module
        self.threads = threads
        self.receive: Callable[[nn.Parameter], None] | None = None
        self._hooked: set[nn.Parameter] = set()
        self.hook_parameters()

    def __reduce__(self) -> tuple[Any, ...]:
        return Exactness, (self.module, self.threads)

    def hook_parameters(self) -> None:
        """Hook every parameter that is not yet, frozen ones too: they may be trained later."""
        for parameter in walked(self.module)[1]:
            can_be_trained = parameter.is_floating_point() or parameter.is_complex()
            if can_be_trained and parameter not in self._hooked and not parameter.is_inference():
                trained = parameter.requires_grad
                parameter.requires_grad_().register_post_accumulate_grad_hook(_Hook(self))
                parameter.requires_grad_(trained)
                self._hooked.add(parameter)


class _Hook:
    """Hands a gradient on to the step that is run, and refuses it where none is."""

    def __init__(self, exact: Exactness) -> None:
        self.exact = weakref.ref(exact)  # the parameter may outlive its wrapper

    def __call__(self, parameter: Any) -> None:
        exact = self.exact()
        if exact is not None and exact.receive is not None:
            exact.receive(parameter)
        elif exact is not None and not _is_received(parameter):
            parameter.grad = None  # it is this rank's alone, and a later `backward` would add to it
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

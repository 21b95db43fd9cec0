"""Hooks on the parameters of an exact model, which raise for gradients that no step of it makes."""

from functools import partial
from weakref import ref

from torch import nn

from pardata.model._torch_internals import name_of, parameters_of
from pardata.strategies._forward import running_step


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

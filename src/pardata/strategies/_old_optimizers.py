"""An optimizer of parameters that sharding has replaced: its steps would train nothing."""

from collections.abc import Callable
from functools import cache
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_looks = WeakKeyDictionary[nn.Module, Callable[[Optimizer], None]]()


def refuse_old_optimizers(module: nn.Module, before: list[ref[nn.Parameter]]) -> None:
    """Let the first step of an optimizer raise if it has parameters that `module` has no more."""
    new = set(module.parameters())
    replaced = [one for one in before if one() not in new]
    checked = WeakSet[Optimizer]()

    def look(one: Optimizer) -> None:
        if one in checked:
            return
        old = {id(parameter) for alive in replaced if (parameter := alive()) is not None}
        own = [id(parameter) for group in one.param_groups for parameter in group["params"]]
        if lost := len(old.intersection(own)):
            raise RuntimeError(
                f"the optimizer must have the parameters of the wrapped model, but {lost} of the "
                f"{len(own)} in {type(one).__name__} are those that wrap_model has replaced, so "
                f"that its steps would train nothing: make the optimizer after wrap_model"
            )
        checked.add(one)

    _watch()
    _looks[module] = look


@cache
def _watch() -> None:
    """Begin to look at optimizers before they step, once for all modules.

    PyTorch raises an error if a hook goes while another one runs, as when a module is collected.
    """
    register_optimizer_step_pre_hook(lambda one, *_: _look(one))


def _look(one: Optimizer) -> None:
    for look in list(_looks.values()):
        look(one)

"""An optimizer of parameters that sharding has replaced: its steps would train nothing."""

from collections.abc import Iterable
from functools import cache
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_MARK = "_pardata_replaced"  # an attribute of such a parameter
_checked = WeakSet[Optimizer]()


def refuse_old_optimizers(replaced: Iterable[nn.Parameter]) -> None:
    """Let a step of an optimizer raise if it has one of these parameters."""
    for parameter in replaced:
        setattr(parameter, _MARK, True)
    _checked.clear()
    _watch()


@cache
def _watch() -> None:
    """Begin to look at optimizers before they step, once for a process."""
    register_optimizer_step_pre_hook(lambda one, *_: _look(one))


def _look(one: Optimizer) -> None:
    if one in _checked:
        return
    own = [parameter for group in one.param_groups for parameter in group["params"]]
    if lost := sum(hasattr(parameter, _MARK) for parameter in own):
        raise RuntimeError(
            f"the optimizer must have the parameters of the wrapped model, but {lost} of the "
            f"{len(own)} in {type(one).__name__} are those that wrap_model has replaced, so "
            f"that its steps would train nothing: make the optimizer after wrap_model"
        )
    _checked.add(one)

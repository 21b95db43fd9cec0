"""An optimizer of parameters that sharding has replaced: its steps would train nothing."""

from weakref import WeakSet, ref

from torch import nn
from torch.optim import Optimizer

from pardata.strategies._optimizer_steps import before_steps


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

    before_steps(module, look)

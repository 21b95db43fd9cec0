"""What looks at optimizers before they step, as long as a module lives."""

from collections.abc import Callable
from functools import cache
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

Look = Callable[[Optimizer], None]

_looks = WeakKeyDictionary[nn.Module, list[Look]]()


def before_steps(module: nn.Module, look: Look) -> None:
    """Call `look` with each optimizer that is about to step, until `module` is gone."""
    _watch()
    _looks.setdefault(module, []).append(look)


@cache
def _watch() -> None:
    """Begin to look, once for all modules.

    PyTorch raises an error if a hook goes while another one runs, as when a module is collected.
    """
    register_optimizer_step_pre_hook(lambda one, *_: _look(one))


def _look(one: Optimizer) -> None:
    for looks in list(_looks.values()):
        for look in looks:
            look(one)

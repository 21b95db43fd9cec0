"""Which strategies there are, and which of them a model is under.

Nothing else asks that. What a step of `backward` does under each stands in one table in the room
of steps, which comes after this one.
"""

from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from torch import nn

from pardata.model._ddp import Replicated
from pardata.model._dp import Scattered
from pardata.model._exact_strategy import Exact
from pardata.model._fsdp import Sharded
from pardata.model._replication import Settings, Strategy
from pardata.model._unwrap import layers
from pardata.ranks._arguments import check_module
from pardata.ranks._logger import get_logger

_log = get_logger(__name__)

StrategyName: TypeAlias = Literal["auto", "none", "dp", "ddp", "fsdp", "exact"]


class Alone(Strategy):
    """Strategy "none": each process trains a model of its own."""

    name = "none"
    is_collective = False

    def check(self, model: nn.Module, settings: Settings) -> None:
        # It takes everything, lazy modules too, and the options of "ddp": "auto" may become either.
        self.check_arguments(model, settings)

    def wrap(self, model: nn.Module, settings: Settings) -> nn.Module:
        if settings.here.size > 1:
            _log.warning(
                "strategy 'none' in a world of %d: each rank trains a model of its own",
                settings.here.size,
                ranks=[0],
                once=True,
            )
        return model


NONE, DP, DDP, FSDP, EXACT = Alone(), Scattered(), Replicated(), Sharded(), Exact()

# In the order in which they are looked for in a model: what reduces gradients first, and the
# costliest question late.
_STRATEGIES: tuple[Strategy, ...] = (EXACT, DDP, FSDP, DP, NONE)


def named(name: object) -> Strategy:
    """Return the strategy of a name.

    Raises:
        ValueError: for a name that no strategy has.
    """
    for strategy in _STRATEGIES:
        if name == strategy.name:
            return strategy
    names = ", ".join(map(repr, get_args(StrategyName)))
    msg = f"`strategy` must be one of {names}, but is {name!r}"
    raise ValueError(msg)


def is_collective(name: str) -> bool:
    """Whether wrapping under a strategy is: of an unknown one too, for others may have it right."""
    return not any(one.name == name and not one.is_collective for one in _STRATEGIES)


class Replica(NamedTuple):
    """This rank's copy of a model, taken apart.

    Attributes:
        strategy: that keeps it equal to the others' copies.
        wrapper: the layer of the model by which the strategy is known; under "none" the outermost.
        module: the module inside all layers.
    """

    strategy: Strategy
    wrapper: Any
    module: nn.Module


def replica_of(model: nn.Module) -> Replica:
    """Take a model apart.

    Raises:
        TypeError: for what is no module.
    """
    check_module(model)
    found = layers(model)
    for strategy in _STRATEGIES:
        for layer in found:
            if isinstance(layer, strategy.wrapper):
                return Replica(strategy, layer, found[-1])
    return Replica(NONE, model, found[-1])


def strategy_of(model: nn.Module) -> Strategy:
    """Return the strategy that `wrap_model`, or PyTorch's own class, has put around a model."""
    return replica_of(model).strategy

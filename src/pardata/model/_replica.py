"""Which strategy a model is under: nothing else asks that."""

from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from torch import nn

from pardata.model._strategy import Alone, Exact, Replicated, Scattered, Sharded, Strategy
from pardata.model._unwrap import layers
from pardata.ranks._arguments import check_module

StrategyName: TypeAlias = Literal["auto", "none", "dp", "ddp", "fsdp", "exact"]

NONE, DP, DDP, FSDP, EXACT = Alone(), Scattered(), Replicated(), Sharded(), Exact()

# In the order in which they are looked for in a model: what reduces gradients first.
STRATEGIES: tuple[Strategy, ...] = (EXACT, DDP, FSDP, DP, NONE)


def named(name: object) -> Strategy:
    """Return the strategy of a name.

    Raises:
        ValueError: for a name that no strategy has.
    """
    for strategy in STRATEGIES:
        if name == strategy.name:
            return strategy
    names = ", ".join(map(repr, get_args(StrategyName)))
    msg = f"`strategy` must be one of {names}, but is {name!r}"
    raise ValueError(msg)


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
    for strategy in STRATEGIES:
        for layer in found:
            if isinstance(layer, strategy.wrapper):
                return Replica(strategy, layer, found[-1])
    return Replica(NONE, model, found[-1])


def strategy_of(model: nn.Module) -> Strategy:
    """Return the strategy that `wrap_model`, or PyTorch's own class, has put around a model."""
    return replica_of(model).strategy

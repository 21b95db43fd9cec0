"""Which strategies there are, and which of them a model is under: nothing else asks that."""

from typing import Literal, TypeAlias, get_args

import torch
from torch import nn

from pardata._validation import check_module
from pardata.model._unwrap import layers
from pardata.strategies._ddp import DdpStrategy
from pardata.strategies._dp import DpStrategy
from pardata.strategies._fsdp import FsdpStrategy
from pardata.strategies._none import NoneStrategy
from pardata.strategies._strategy import Strategy
from pardata.strategies.exact._exact import ExactStrategy

StrategyName: TypeAlias = Literal["auto", "none", "dp", "ddp", "fsdp", "exact"]

_NONE = NoneStrategy()

# In the order in which they are looked for in a model: what reduces gradients first.
STRATEGIES: tuple[Strategy, ...] = (
    *(ExactStrategy(), DdpStrategy(), FsdpStrategy(), DpStrategy(), _NONE),
)


def named(name: object) -> Strategy:
    """Return the strategy of a name.

    Raises:
        ValueError: for a name that no strategy has.
    """
    for strategy in STRATEGIES:
        if name == strategy.name:
            return strategy
    names, given = ", ".join(map(repr, get_args(StrategyName))), repr(name)
    if isinstance(name, torch.optim.Optimizer):  # other libraries wrap it with the model
        given = "an optimizer: make that after wrapping, of what wrap_model returns"
    raise ValueError(f"`strategy` must be one of {names}, but is {given}")


def strategy_and_layer(model: nn.Module) -> tuple[Strategy, nn.Module]:
    """Return the strategy that `wrap_model`, or PyTorch's own class, has put around a model.

    And the layer by which it is known.

    Raises:
        TypeError: for what is no module.
    """
    check_module(model)
    for strategy in STRATEGIES:
        for layer in layers(model):
            if isinstance(layer, strategy.wrapper):
                return strategy, layer
    return _NONE, model


def strategy_of(model: nn.Module) -> Strategy:
    """Return the strategy that a model is under."""
    return strategy_and_layer(model)[0]

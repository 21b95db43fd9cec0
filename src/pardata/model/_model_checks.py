"""Is this a model that the strategy can take, and is it the same on every rank?"""

import inspect
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from pardata.model._unwrap import is_parallel
from pardata.ranks._table import table_of

# Kinds of options that can be compared between ranks.
_PLAIN = (bool, int, float, str)


def check_not_wrapped(model: nn.Module, *, but_for_sharded_parts: bool) -> None:
    """Refuse what is wrapped already."""
    if is_parallel(model, but_for_sharded_parts=but_for_sharded_parts):
        msg = (
            f"`model` must not be wrapped yet, but is or holds a wrapped module "
            f"({type(model).__name__}): pass unwrap(model), or wrap once, at the outside"
        )
        raise ValueError(msg)


def check_trainable(model: nn.Module, strategy: str) -> None:
    """Refuse a model that is not ready, or has nothing to train."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(is_lazy(tensor) for tensor in tensors):
        msg = "`model` must be initialised, but has lazy parameters: run one forward pass first"
        raise ValueError(msg)
    if any(tensor.is_meta for tensor in tensors):
        msg = (
            "`model` must have its weights on every rank, but has parameters or buffers on the "
            "meta device: build it on a real one, or call to_empty() and initialise them first"
        )
        raise ValueError(msg)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        msg = (
            f"`model` must have a parameter to train under strategy {strategy!r}, but "
            f"{type(model).__name__} has none that requires a gradient: use strategy='none'"
        )
        raise ValueError(msg)


def check_options(
    strategy: str, options: dict[str, Any], takes_them: Callable[..., object]
) -> None:
    """Refuse options that what takes a strategy's options does not know."""
    known = set(inspect.signature(takes_them).parameters) - {"module"}
    unknown = sorted(options.keys() - known)
    if unknown:
        msg = (
            f"`options` must be ones of strategy {strategy!r}, but {unknown[0]!r} is not; there "
            f"are {', '.join(sorted(known))}"
        )
        raise TypeError(msg)


def facts_of(model: nn.Module, strategy: str, options: dict[str, Any]) -> dict[str, object]:
    """Describe what must be the same on all ranks."""
    # Options too: ranks that differ in find_unused_parameters would wait for each other for ever.
    plain = {key: value for key, value in options.items() if isinstance(value, _PLAIN)}
    plain.pop("output_device", None)  # each rank's own
    facts: dict[str, object] = {"the strategy": strategy, "the options": plain}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        trained = ", trained" if tensor.requires_grad else ""
        facts[name] = f"{tuple(tensor.shape)} {tensor.dtype}{trained}".replace("torch.", "")
    return facts


def check_same_models(told: list[dict[str, object]]) -> None:
    """Raise, with a table of the first difference, if the ranks hold different models."""
    models = [[f"`{name}` {fact}" for name, fact in facts.items()] for facts in told]
    if all(model == models[0] for model in models):
        return
    entries = zip_longest(*models, fillvalue="no further parameter or buffer")
    first = next(entry for entry in entries if len(set(entry)) > 1)
    msg = (
        f"every rank must pass the same model to `wrap_model`, but they differ, first here:\n"
        f"{table_of(first)}\nBuild the same model, in the same order, on every rank."
    )
    raise RuntimeError(msg)

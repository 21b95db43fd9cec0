"""Is this a model that the strategy can take, and is it the same on every rank?"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from pardata.model._unwrap import is_parallel


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


def signature(model: nn.Module, facts: dict[str, object]) -> dict[str, object]:
    """Return `facts`, and those of a model that must be the same on all ranks."""
    facts = dict(facts)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        trained = ", trained" if tensor.requires_grad else ""
        facts[name] = f"{tuple(tensor.shape)} {tensor.dtype}{trained}".replace("torch.", "")
    return facts


def check_same_models(told: list[dict[str, object]]) -> None:
    """Raise, naming the first difference, if the ranks hold different models."""
    reference = told[0]
    for rank, facts in enumerate(told):
        if list(facts.items()) == list(reference.items()):
            continue
        pairs = zip([*reference, None], [*facts, None], strict=False)
        first, other = next(
            (ours, theirs)
            for ours, theirs in pairs
            if ours != theirs or reference[str(ours)] != facts[str(ours)]
        )
        msg = (
            f"every rank must pass the same model to `wrap_model`, but rank {rank} differs from "
            f"rank 0, first here:\n"
            f"  rank 0: {_entry(reference, first)}\n  rank {rank}: {_entry(facts, other)}\n"
            f"Build the same model, in the same order, on every rank."
        )
        raise RuntimeError(msg)


def _entry(facts: dict[str, object], name: str | None) -> str:
    return "no further parameter or buffer" if name is None else f"`{name}` {facts[name]}"

"""Collectives that a `loss_fn` must not start: how often they run would depend on the ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_reason: ContextVar[str] = ContextVar("reason", default="")
_allows_differentiable: ContextVar[bool] = ContextVar("allows_differentiable", default=False)

_CURE = (
    "return numbers and metrics from `loss_fn`, or let `count` return what a microbatch counts: "
    "backward takes their means over all ranks; or call it before backward"
)


@contextmanager
def forbidding_collectives(reason: str, *, allow_differentiable: bool) -> Iterator[None]:
    """Let the collectives of pardata raise in the block, on every rank.

    Args:
        reason: why they must not be called.
        allow_differentiable: except `all_gather` with ``differentiable=True``.
    """
    tokens = _reason.set(reason), _allows_differentiable.set(allow_differentiable)
    try:
        yield
    finally:
        _reason.reset(tokens[0])
        _allows_differentiable.reset(tokens[1])


def check_allowed(call: str, *, differentiable: bool = False) -> None:
    """Raise a `RuntimeError` where `call` must not be made."""
    if (reason := _reason.get()) and not (differentiable and _allows_differentiable.get()):
        raise RuntimeError(f"`{call}` must not be called in {reason}: {_CURE}")

"""Collectives that a `loss_fn` must not start: how often they run would depend on the ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Why collectives must not be called, "" if they may.
_forbidden: ContextVar[str] = ContextVar("forbidden", default="")

_CURE = (
    "return numbers and metrics from `loss_fn`, or let `count` return what a microbatch counts: "
    "backward takes their means over all ranks; or call it before backward"
)


@contextmanager
def forbidding_collectives(reason: str) -> Iterator[None]:
    """Let the collectives of pardata raise in the block, on every rank, for that reason."""
    token = _forbidden.set(reason)
    try:
        yield
    finally:
        _forbidden.reset(token)


def check_allowed(call: str) -> None:
    """Raise a `RuntimeError` where `call` must not be made."""
    if reason := _forbidden.get():
        raise RuntimeError(f"`{call}` must not be called in {reason}: {_CURE}")

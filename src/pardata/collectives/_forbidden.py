"""Collectives that a `loss_fn` must not start: how often they run would depend on the ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Why collectives must not be called, and whether a differentiable one may; "" if all may.
_forbidden: ContextVar[tuple[str, bool]] = ContextVar("forbidden", default=("", False))

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
    token = _forbidden.set((reason, allow_differentiable))
    try:
        yield
    finally:
        _forbidden.reset(token)


def check_allowed(call: str, *, differentiable: bool = False) -> None:
    """Raise a `RuntimeError` where `call` must not be made."""
    reason, allows_differentiable = _forbidden.get()
    if reason and not (differentiable and allows_differentiable):
        raise RuntimeError(f"`{call}` must not be called in {reason}: {_CURE}")

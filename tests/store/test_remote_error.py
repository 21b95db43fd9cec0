"""An exception that travels: whole where it can, else as text, never lost."""

import json
from dataclasses import asdict
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import run

from pardata.store._remote_error import (
    RemoteError,
    exception_chain,
    is_peer_failure,
    summary_line,
    type_and_message,
)


class Odd(Exception):  # noqa: N818  # named for what it does
    """Its pickle is what it is told to be: comes back as that, or fails."""

    def __init__(self, text, pickled):
        super().__init__(text)
        self.pickled = pickled

    def __reduce__(self):
        return self.pickled()


def explode():
    raise ZeroDivisionError


class Speechless(Exception):  # noqa: N818  # as above
    """Has no text at all: str() raises."""

    def __str__(self):
        raise ZeroDivisionError


def travelled(failure):
    return RemoteError(**json.loads(json.dumps(asdict(failure))))


# Plain ones: docs/errors.md. Interrupts, and one that takes two arguments:
# tests/collectives/test_barrier.py.
def raised(error):
    """Raise `error` and return its `RemoteError`, after a journey as JSON."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001  # SystemExit too
        failure = RemoteError.of(caught, rank=3, call="rank_zero_call")
    return travelled(failure)


class Local(Exception):  # noqa: N818  # as above
    """Stands for a class that other processes cannot import."""


Local.__qualname__ = "function.<locals>.Local"


NOT_SURVIVING = [
    Odd("comes back without its text", lambda: (Odd, ("", explode))),
    Odd("comes back as another type", lambda: (ValueError, ("comes back as another type",))),
    Odd("fails in pickle", explode),
    ValueError(lambda: "cannot be pickled"),
    Local("x"),
    Speechless(),
]


@pytest.mark.parametrize("error", NOT_SURVIVING, ids=lambda error: type_and_message(error)[:20])
def test_an_exception_that_does_not_survive_comes_back_as_its_type_and_text(error):
    failure = raised(error)
    assert failure.pickled is None
    with pytest.raises(RuntimeError) as caught:
        raise failure.to_exception()
    assert str(caught.value) == f"rank 3 failed in `rank_zero_call`: {type_and_message(error)}"
    assert failure.summary == str(caught.value)


LINES = [
    (ValueError("a table:\n  row"), "ValueError: a table"),
    (ValueError("x" * 10**6), f"ValueError: {'x' * 1988}"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (Speechless(), "Speechless: <exception str() failed>"),
]


@pytest.mark.parametrize(("error", "text"), LINES)
def test_any_error_fits_on_one_line_with_its_place(error, text):
    assert summary_line(error) == f"{text} (an unknown line)"


@given(st.text(), st.integers(0, 10**6), st.text(max_size=5))
def test_any_text_survives_the_journey(text, rank, call):
    failure = RemoteError.of(ValueError(text), rank=rank, call=call)
    assert travelled(failure) == failure
    assert failure.text.removeprefix("ValueError: ") == (text.strip() or "ValueError")


# --- whose fault it is


LOST_OR_NOT = [
    (RuntimeError("[x/gloo/transport/tcp/pair.cc:5] Connection closed by peer"), True),
    (RuntimeError("Application timeout caused pair closure"), True),
    (RuntimeError("Got an error: RuntimeError: [a/gloo/x.cc:9] Connection reset by peer"), True),
    (RuntimeError("tracker: Connection reset by peer"), False),
    (RuntimeError("Timed out waiting for the licence server"), False),
    (RuntimeError("database: operation timeout"), False),
    (RuntimeError("Timed out waiting 5ms for recv operation to complete"), True),
    (dist.DistStoreError("wait timeout after 5ms, keys: /0"), True),
    (dist.DistBackendError("NCCL error: remote process exited\nncclRemoteError"), True),
    (dist.DistBackendError("Watchdog caught collective operation timeout: x"), True),
    (dist.DistBackendError("NCCL error: unhandled cuda error"), False),
    (ConnectionResetError("Connection reset by peer"), False),
]


@pytest.mark.parametrize(("error", "lost"), LOST_OR_NOT)
def test_only_what_a_backend_says_of_its_peers_is_a_lost_collective(error, lost):
    assert is_peer_failure(error) == lost
    assert RemoteError.of(error, rank=0, call="").is_secondary == lost


def raised_by_torch(text):
    """Raise in C++, as a backend does."""
    torch.ops.aten._assert_scalar(False, text)  # torch's own


def raised_while_another_is_handled(text):
    try:
        raised_by_torch(text)
    except RuntimeError:
        raise KeyError("x")  # noqa: B904  # that is what is tested


def wait_in_vain():
    """Wait for a collective in which the other rank is not, in every way that a user has."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    found = []
    for wait in (lambda work: work.wait(), lambda work: work.get_future().wait()):
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError) as caught:
                wait(dist.all_reduce(torch.ones(1), group=group, async_op=True))
            found.append((is_peer_failure(caught.value), str(caught.value)))
    dist.barrier()
    return found


def test_a_collective_that_the_user_waits_for_is_lost_too():
    found, _ = run(wait_in_vain, world_size=2, fresh=True)
    assert [lost for lost, _ in found] == [True] * 2, found


SAID = "[x/gloo/transport/tcp/pair.cc:5] Connection closed by peer"


@pytest.mark.parametrize("raise_it", [raised_by_torch, raised_while_another_is_handled])
def test_what_comes_of_a_lost_collective_is_no_cause(raise_it):
    with pytest.raises((RuntimeError, KeyError)) as caught:
        raise_it(SAID)
    assert RemoteError.of(caught.value, rank=0, call="").is_secondary


def test_a_chain_of_errors_that_bites_its_tail_ends():
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert list(exception_chain(first)) == [first, second]

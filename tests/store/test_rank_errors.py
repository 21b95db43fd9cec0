"""An exception that travels: whole where it can, else as text, never lost."""

import json
import re
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from on_ranks import run

from pardata.store._rank_errors import RemoteError, is_peer_failure, is_secondary, summary_line


class Odd(Exception):  # noqa: N818  # named for what it is
    """Comes back from its pickle without its text, or as another type."""

    def __init__(self, text, kind=None):
        super().__init__(text)
        self.kind = kind

    def __reduce__(self):
        return (self.kind, self.args) if self.kind else (Odd, ("",))


class Speechless(Exception):  # noqa: N818  # as above
    """Has no text at all: str() raises."""

    def __str__(self):
        raise ZeroDivisionError


# Plain ones: tests/promises/errors.md. Interrupts, and one that takes two arguments:
# tests/collectives/test_barrier.py.
NOT_SURVIVING = [
    (Odd("comes back without its text"), "Odd: comes back without its text"),
    (Odd("comes back as another", ValueError), "Odd: comes back as another"),
    (ValueError(threading.Lock()), "ValueError: <unlocked _thread.lock object at .*"),
    (Speechless(), "Speechless: <exception str\\(\\) failed>"),
]


@pytest.mark.parametrize(("error", "text"), NOT_SURVIVING)
def test_an_exception_that_pickle_loses_comes_back_as_text(error, text):
    failure = RemoteError.of(error, rank=3, call="rank_zero_call")
    travelled = RemoteError(**json.loads(json.dumps(failure._asdict())))
    with pytest.raises(RuntimeError) as caught:
        raise travelled.to_exception()
    assert re.fullmatch(
        rf"rank 3 failed in `rank_zero_call`: (test_rank_errors\.)?{text}", str(caught.value)
    )


LINES = [
    (ValueError("a table:\n  row"), "ValueError: a table"),
    (ValueError("x" * 10**6), f"ValueError: {'x' * 1988}"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
]


@pytest.mark.parametrize(("error", "text"), LINES)
def test_any_error_fits_on_one_line_with_its_place(error, text):
    assert summary_line(error) == f"{text} (an unknown line)"


# --- whose fault it is


LOST_OR_NOT = [
    (RuntimeError("[x/gloo/transport/tcp/pair.cc:5] Connection closed by peer"), True),
    (RuntimeError("Application timeout caused pair closure"), True),
    (RuntimeError("tracker: Connection reset by peer"), False),
    (RuntimeError("Timed out waiting for the license server"), False),
    (RuntimeError("Timed out waiting 5ms for recv operation to complete"), True),
    (dist.DistStoreError("wait timeout after 5ms, keys: /0"), True),
    (dist.DistBackendError("NCCL error: remote process exited\nncclRemoteError"), True),
    (dist.DistBackendError("Watchdog caught collective operation timeout: x"), True),
    (dist.DistBackendError("NCCL error: unhandled cuda error"), False),
    (ConnectionResetError("Connection reset by peer"), False),
]


@pytest.mark.parametrize(("error", "lost"), LOST_OR_NOT)
def test_only_what_a_backend_says_of_its_peers_is_a_lost_collective(error, lost):
    assert is_peer_failure(error) == is_secondary(error) == lost


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


def test_a_lost_collective_is_secondary_in_a_cyclic_exception_chain():
    lost = RuntimeError("[x/gloo/transport/tcp/pair.cc:5] Connection closed by peer")
    first, second = KeyError(), ValueError()
    first.__cause__, second.__context__ = second, first
    assert not is_secondary(first)
    second.__context__ = lost
    assert is_secondary(first)

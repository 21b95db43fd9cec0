"""The ranks that live on from test to test: who comes back, and who is replaced."""

import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import on_ranks
import pytest
import torch.distributed as dist
from on_ranks import run, run_caught

from pardata import all_reduce_sum, barrier, init, world
from pardata.ranks._backend import backends

SIZE = 2


def raise_on_each():
    raise LookupError(f"rank {world().rank}")


def raise_on_one():
    if world().rank == 1:
        raise KeyError("alone")
    barrier("in vain")


def hang_on_one():
    if world().rank == 1:
        time.sleep(1000)


def leave_a_thread():
    threading.Thread(target=time.sleep, args=[1000], daemon=True).start()


def leave_the_group():
    dist.destroy_process_group()


def change_everything():
    os.environ["LEFT"] = "behind"
    os.chdir("/")
    random.seed(1)
    sys.path.append("nowhere")
    logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    init()


def state():
    with warnings.catch_warnings(record=True) as shown:
        warnings.warn("each time", stacklevel=1)
    found = os.environ.get("LEFT"), Path.cwd(), random.random(), "nowhere" in sys.path
    found += len(logging.root.handlers), logging.root.level, len(backends())
    return [*found, len(shown), signal.getsignal(signal.SIGTERM), all_reduce_sum(1)]


def test_ranks_live_on_after_errors_that_all_raise():
    before = run(os.getpid, world_size=SIZE)
    with pytest.raises(LookupError, match=r"rank [01]") as caught:
        run(raise_on_each, world_size=SIZE)
    assert "raised on rank" in str(caught.value.__cause__)
    texts = [each.text for each in run_caught(raise_on_each, world_size=SIZE)]
    assert texts == ["rank 0", "rank 1"]
    assert run(os.getpid, world_size=SIZE) == before
    assert not set(run(os.getpid, world_size=SIZE, fresh=True)) & set(before)


def test_a_test_finds_nothing_of_the_one_before():
    before = run(state, world_size=SIZE)
    run(change_everything, world_size=SIZE)
    assert run(state, world_size=SIZE) == before


@pytest.mark.parametrize(
    ("test", "error", "text"),
    [
        (raise_on_one, KeyError, "alone"),
        (hang_on_one, TimeoutError, r"within 2 s, but \[1\] did not(?s:.*)in hang_on_one"),
        (leave_a_thread, None, ""),
        (leave_the_group, None, ""),
    ],
)
def test_ranks_that_cannot_go_on_are_replaced(test, error, text):
    before = run(os.getpid, world_size=SIZE)
    if error is None:
        run(test, world_size=SIZE)
    else:
        with pytest.raises(error, match=text):
            run(test, world_size=SIZE, timeout=2)
    assert not set(run(os.getpid, world_size=SIZE)) & set(before)


def test_ranks_that_die_between_tests_are_an_error_that_names_the_test_before():
    before = run(os.getpid, world_size=SIZE)
    os.kill(before[1], signal.SIGKILL)
    assert on_ranks._teams[SIZE]._pipes[1].poll(60)  # its end of it is closed
    with pytest.raises(RuntimeError, match=r"ranks \[1\] have died .* was .*names_the_test_before"):
        run(os.getpid, world_size=SIZE)
    assert not set(run(os.getpid, world_size=SIZE)) & set(before)

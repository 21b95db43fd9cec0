"""What one rank does for all, and waiting for each other."""

import gc
import json
import os
import re
import time
import weakref
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
from on_ranks import caught, run, run_caught

from pardata import all_reduce_sum, barrier, broadcast, init, rank_zero_call, rank_zero_first, world
from pardata.environment._world import store_client
from pardata.store._round import exchange

SIZES = [1, 2, 4]
SOON, LONG = timedelta(seconds=1), timedelta(seconds=60)


class Unpicklable(Exception):  # noqa: N818  # named for what it is
    """Needs two arguments, and pickle gives it one."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


def in_first(call=int, **options):
    with rank_zero_first(**options):
        call()


# --- barrier


def wait_for_the_last(directory):
    here = world()
    if here.rank == here.size - 1:
        time.sleep(0.2)
        (Path(directory) / "late").touch()
    barrier("files")
    return (Path(directory) / "late").exists()


@pytest.mark.parametrize("size", SIZES)
def test_a_barrier_waits_for_the_last_rank(size, tmp_path):
    assert run_caught(wait_for_the_last, str(tmp_path), world_size=size) == [True] * size


def call_with_little_patience():
    with patch("pardata.collectives._barrier._HOURS", SOON):
        rank_zero_call(str, 1)


WAITS = {
    "barrier('epoch 3')": lambda: barrier("epoch 3", SOON),
    "rank_zero_first": lambda: in_first(timeout=SOON),
    "rank_zero_call(str)": call_with_little_patience,
}


def wait_without(absent, call):
    """Return what the last rank raises, which waits alone: the others come once it gave up."""
    barrier("all are there")
    if world().rank in absent:
        store_client().store.wait(["gave-up"], LONG)
        return None
    raised = caught(WAITS[call])
    store_client().store.set("gave-up", "")
    return raised


@pytest.mark.parametrize(
    ("call", "absent", "names"),
    [
        ("barrier('epoch 3')", [0, 2], "ranks 0, 2"),
        *((call, [0], "rank 0") for call in WAITS if call.startswith("rank_zero")),
    ],
)
def test_a_timeout_names_the_call_and_the_missing_ranks(call, absent, names):
    size = len(absent) + 1
    raised = run_caught(wait_without, absent, call, world_size=size, fresh=True)[1]
    assert str(raised).startswith(
        f"TimeoutError: `{call}` must be reached by every rank, but {names} of {size} did not "
        f"come within {SOON}: look at the output of {names} for an earlier error"
    )
    assert re.search(r"this rank waits at \S*test_barrier\.py:\d+$", raised.text)


def wait_where_rank_0_works():
    raised = caught(in_first if world().is_main else barrier)
    barrier("again")
    return raised


def test_a_barrier_is_told_of_a_rank_0_that_works_elsewhere():
    for raised in run_caught(wait_where_rank_0_works, world_size=3):
        assert str(raised) == (
            "RuntimeError: every rank must make the same calls in the same order, but here:\n"
            "  rank 0: rank_zero_first\n  ranks 1, 2: barrier()"
        )


# --- rank_zero_first


def record_order(directory, local):
    file = Path(directory) / "data"
    with rank_zero_first(local=local):
        found = file.exists()
        if world().rank == 0:
            time.sleep(0.2)
            file.write_text("downloaded")
    return found


@pytest.mark.parametrize(("size", "local"), [(1, False), (2, True), (4, False)])
def test_rank_0_goes_first_and_the_others_find_what_it_did(size, local, tmp_path):
    found = run_caught(record_order, str(tmp_path), local, world_size=size)
    assert found == [False] + [True] * (size - 1)


def first_on_each_of_two_nodes(directory):
    """Return what two nodes of two ranks find in two blocks, and what comes of a failure on one."""
    here = world()
    # What torchrun would say.
    os.environ.update(LOCAL_RANK=str(here.rank % 2), LOCAL_WORLD_SIZE="2")
    found = []
    for number in range(2):
        file = Path(directory) / f"node{here.rank // 2}.{number}"
        with rank_zero_first(local=True):
            found.append(file.exists())
            file.touch()
    return found, caught(fail_on_node, 1), all_reduce_sum(1)


def fail_on_node(failing):
    with rank_zero_first(local=True):
        assert world().is_local_main, "ran on a rank that should not"
        if world().node_rank == failing:
            raise ValueError("no disk")


def test_local_goes_first_on_each_node_and_raises_on_every_rank(tmp_path):
    outcomes = run_caught(first_on_each_of_two_nodes, tmp_path, world_size=4, fresh=True)
    for rank, (found, raised, total) in enumerate(outcomes):
        assert found == [rank % 2 == 1] * 2
        assert raised.type == "ValueError"
        assert rank == 2 or "raised on rank 2 in `rank_zero_first`" in raised.cause
        assert total == 4


def go_first_where_nobody_says_what_a_node_is():
    del os.environ["LOCAL_WORLD_SIZE"]
    raised = caught(lambda: in_first(local=True))
    with init(), rank_zero_first(local=True):
        return raised


def test_of_a_group_made_without_init_the_nodes_are_not_known():
    for raised in run_caught(go_first_where_nobody_says_what_a_node_is, world_size=2, fresh=True):
        assert str(raised).startswith(
            "RuntimeError: `rank_zero_first(local=True)` must know the ranks of a node: call "
            "`pardata.init()`, which adopts the group"
        )


def fail_in_first(error):
    with rank_zero_first():
        assert world().is_main, "ran on a rank that should not"
        fail_with(error)


def fail_with(error):
    raise error


# Of what pickles, and of SystemExit: tests/promises/errors.md.
FAILING = [
    (fail_in_first, "rank_zero_first", KeyboardInterrupt("no disk")),
    (fail_in_first, "rank_zero_first", Unpicklable("no", "disk")),
    (lambda error: rank_zero_call(fail_with, error), "rank_zero_call", Unpicklable("no", "disk")),
]


def fail_and_go_on():
    raised = []
    for fail, _, error in FAILING:
        raised.append(caught(fail, error))
        barrier("afterwards")
    return raised, all_reduce_sum(world().rank), rank_zero_call(str, 7)


@pytest.mark.parametrize("size", [1, 3])
def test_an_exception_on_rank_0_is_raised_on_every_rank(size):
    for rank, (found, total, result) in enumerate(run_caught(fail_and_go_on, world_size=size)):
        for raised, (_, place, error) in zip(found, FAILING, strict=True):
            assert raised.seconds < 30
            kind = type(error).__name__
            if rank == 0:
                assert str(raised) == f"{kind}: {error}"
                continue
            told = f"RuntimeError: rank 0 failed in `{place}`: test_barrier.{kind}: {error}"
            assert str(raised) == (told if kind == "Unpicklable" else f"{kind}: {error}")
            assert raised.cause.startswith(f"raised on rank 0 in `{place}`:\n\nTraceback")
            assert re.search(r"test_barrier\.py.*line \d+, in fail_with", raised.cause)
        assert (total, result) == (sum(range(size)), "7")


# --- rank_zero_call


def test_one_process_gets_the_result_itself_pickled_or_not():
    assert callable(rank_zero_call(lambda: lambda: None))


LARGE = 9 * 2**20  # more than the store takes at once


def fail_largely():
    raise ValueError("é" * LARGE)


def parse_what_is_large():
    """Raise an error of a short text that holds all that was read."""
    json.loads(f"[{'1,' * (LARGE // 2)}x]")


def return_and_raise_what_is_large():
    found = rank_zero_call(lambda: (b"0" * LARGE, [f"{n:012d}" for n in range(100_000)]))
    raised = [caught(rank_zero_call, fail) for fail in (fail_largely, parse_what_is_large)]
    raised.append(caught(exchange, store_client(), "here", lambda: "x" * LARGE))
    barrier("afterwards")
    texts = [(each.type, len(each.text), each.text[:100]) for each in raised]
    return (len(found[0]), len(found[1]), found[1][-1]), texts


def test_a_large_result_comes_whole_and_a_large_exception_as_its_text():
    # Fresh ranks: the store of those that live on is a file, which tests of full disks keep small.
    ranks = run(return_and_raise_what_is_large, world_size=2, fresh=True)
    assert [result for result, _ in ranks] == [(LARGE, 100_000, "000000099999")] * 2
    (_, (*own, refused)), (_, (*told, _)) = ranks
    assert [kind for kind, *_ in own] == ["ValueError", "JSONDecodeError"]
    assert refused[2].startswith("`here` must compare at most 4 MiB, but got 9.0")
    start = "rank 0 failed in `rank_zero_call`:"
    for (kind, length, text), says in zip(
        told, ["ValueError: éé", "json.decoder.JSONDecodeError: "], strict=True
    ):
        assert (kind, length < 70_000) == ("RuntimeError", True)
        assert text.startswith(f"{start} {says}")


class TwoArguments:
    """Pickles, and cannot be unpickled."""

    def __init__(self, a, b):
        self.args = a, b

    def __reduce__(self):
        return TwoArguments, (1,)


def return_something_that_does_not_unpickle():
    return caught(rank_zero_call, TwoArguments, 1, 2)


def test_a_result_that_cannot_be_unpickled_fails_on_rank_0_too():
    for raised in run_caught(return_something_that_does_not_unpickle, world_size=2):
        assert raised.type == "TypeError"
        assert "missing 1 required positional argument" in raised.text


class LostError(ValueError):
    """An error that can be watched."""


def lose():
    raise LostError


def watched_error():
    """Return whether the error is gone once it is caught, without a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        rank_zero_call(lose)
    except LostError as error:
        watched = weakref.ref(error)
    finally:
        gc.enable()
    return watched() is None


def test_a_caught_error_is_freed_without_garbage_collection():
    assert run(watched_error, world_size=2) == [True, True]


# --- what all must reach, where only one is


# What must be reached by every rank, and within what; of `barrier`: tests/promises/errors.md.
NESTED = [
    ("all_reduce_sum", "rank_zero_first", lambda: in_first(lambda: all_reduce_sum(1))),
    ("broadcast", "rank_zero_first", lambda: in_first(lambda: broadcast(1), local=True)),
    ("rank_zero_first", "rank_zero_first", lambda: in_first(in_first)),
    ("rank_zero_call(max)", "rank_zero_first", lambda: in_first(lambda: rank_zero_call(max, 1, 2))),
    ("barrier()", "rank_zero_call", lambda: rank_zero_call(barrier)),
    ("rank_zero_first", "rank_zero_call", lambda: rank_zero_call(in_first)),
    ("rank_zero_first(local=True)", "rank_zero_call", lambda: rank_zero_call(in_first, local=True)),
]


def nest():
    raised = []
    for *_, work in NESTED:
        raised.append(caught(work))
        barrier("the group is usable")
    return raised


def test_a_collective_inside_a_rank_0_call_raises_on_every_rank():
    for found in run(nest, world_size=2):
        for raised, (call, place, _) in zip(found, NESTED, strict=True):
            assert str(raised) == (
                f"RuntimeError: `{call}` must be reached by every rank, but the others wait for "
                f"`{place}`: call it after that"
            )

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
import torch
from on_ranks import caught, run, run_caught
from torch import nn

from pardata import all_reduce_sum, barrier, broadcast, rank_zero_call, rank_zero_first, world
from pardata.collective._agreement import agree
from pardata.collective._rank_zero import _of_node, call_off_everywhere
from pardata.messages._turn import Turn
from pardata.ranks._world import channel

SIZES = [1, 2, 4]
SOON, LONG = timedelta(seconds=1), timedelta(seconds=60)


class Unpicklable(Exception):  # noqa: N818  # named for what it is
    """Needs two arguments, and pickle gives it one."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


ERRORS = {
    "ValueError": lambda: ValueError("the file is truncated"),
    "Unpicklable": lambda: Unpicklable(5, "the file is truncated"),
    "SystemExit": lambda: SystemExit("the file is truncated"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("the file is truncated"),
}


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


def wait_without(absent, wait):
    """Return what ranks raise that wait, while `absent` ones come only once they have given up."""
    barrier("all are there")
    if world().rank in absent:
        channel().store.wait(["gave-up"], LONG)
        return None
    raised = caught(wait)
    channel().store.set("gave-up", "")
    return raised


def in_barrier():
    # Of two that wait the first is there before the second's short wait begins.
    if world().rank == 2:
        channel().store.wait(["rank 0 waits"], LONG)
        while json.loads(channel().store.get("at/0"))["call"] != "barrier('epoch 3')":
            time.sleep(0.01)
    channel().store.set(f"rank {world().rank} waits", "")
    barrier("epoch 3", LONG if world().rank == 0 and world().size > 2 else SOON)


def in_call():
    with patch("pardata.collective._rank_zero._HOURS", SOON):
        rank_zero_call(str, 1)


def in_first():
    with rank_zero_first(timeout=SOON):
        pass


@pytest.mark.parametrize(
    ("size", "absent", "names"), [(2, [0], "rank 0 of 2"), (4, [1, 3], "ranks 1, 3 of 4")]
)
def test_a_barrier_names_the_ranks_that_did_not_come(size, absent, names):
    outcomes = run_caught(wait_without, absent, in_barrier, world_size=size, fresh=True)
    for raised in (outcomes[rank] for rank in range(size) if rank not in absent):
        assert str(raised).startswith(
            f"TimeoutError: `barrier('epoch 3')` must be reached by every rank, but {names} did "
            f"not come within {SOON}"
        )


def wait_where_rank_0_works(call):
    here = world()
    told = channel().store
    if here.rank:
        raised = caught(barrier)
        told.add("have been told", 1)
    elif call.startswith("first"):
        raised = caught(work_first, call != "first")
    else:
        raised = caught(rank_zero_call, until_all_are_told)
    barrier("again")
    return raised


def work_first(local):
    with rank_zero_first(local=local):
        until_all_are_told()


def until_all_are_told():
    while channel().store.add("have been told", 0) < world().size - 1:
        time.sleep(0.01)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("call", ["first", "first(local=True)", "call(until_all_are_told)"])
def test_a_barrier_is_told_at_once_of_a_rank_0_that_works_elsewhere(call, size):
    for raised in run_caught(wait_where_rank_0_works, call, world_size=size, fresh=True):
        others = "rank 1" if size == 2 else "ranks 1, 2"
        assert (raised.type, raised.seconds < 10) == ("RuntimeError", True)
        assert raised.text == (
            f"every rank must make the same calls in the same order, but here:\n"
            f"  rank 0: rank_zero_{call}\n  {others}: barrier()"
        )


# --- rank_zero_first


def record_order(directory, local):
    here = world()
    file = Path(directory) / "data"
    with rank_zero_first(local=local):
        found = file.exists()
        if here.rank == 0:
            time.sleep(0.2)
            file.write_text("downloaded")
    return found


@pytest.mark.parametrize(("size", "local"), [(1, False), (2, True), (4, False)])
def test_rank_0_goes_first_and_the_others_find_what_it_did(size, local, tmp_path):
    found = run_caught(record_order, str(tmp_path), local, world_size=size)
    assert found == [False] + [True] * (size - 1)


def first_on_each_of_two_nodes(directory):
    """Return what two nodes of two ranks find in two turns, and what comes of a failure on one."""
    here = world()
    # What torchrun would say.
    os.environ.update(LOCAL_RANK=str(here.rank % 2), LOCAL_WORLD_SIZE="2")
    file = Path(directory) / f"node{here.rank // 2}"
    found = []
    for turn in range(2):
        with rank_zero_first(local=True):
            found.append(file.with_suffix(f".{turn}").exists())
            file.with_suffix(f".{turn}").touch()
    raised = caught(fail_on_node, 1)
    return found, raised, all_reduce_sum(1)


def fail_on_node(failing):
    here = world()
    with rank_zero_first(local=True):
        if here.node_rank == failing:
            assert here.is_local_main, "ran on a rank that should not"
            raise ValueError("no disk")


def test_the_first_rank_of_each_node_goes_first_where_local_and_fails_for_its_node(tmp_path):
    outcomes = run_caught(first_on_each_of_two_nodes, tmp_path, world_size=4, fresh=True)
    assert [found for found, _, _ in outcomes] == [[False] * 2, [True] * 2] * 2
    assert [raised and raised.type for _, raised, _ in outcomes] == [None] * 2 + ["ValueError"] * 2
    assert "raised on rank 2 in `rank_zero_first`" in outcomes[3][1].cause
    assert [total for *_, total in outcomes] == [4] * 4


def fail_in_first(error):
    with rank_zero_first():
        assert world().is_main, "ran on a rank that should not"
        raise_it(error)


def fail_in_call(error):
    rank_zero_call(raise_it, error)


def raise_it(error):
    exception = ERRORS[error]()
    raise exception


FAILING = [(fn, error) for fn in (fail_in_first, fail_in_call) for error in ERRORS]


def fail_and_go_on():
    raised = []
    for fn, error in FAILING:
        raised.append(caught(fn, error))
        barrier("afterwards")
    return raised, all_reduce_sum(world().rank), rank_zero_call(str, 7)


@pytest.mark.parametrize("size", SIZES)
def test_an_exception_on_rank_0_is_raised_on_every_rank_at_once_with_its_origin(size):
    for rank, (found, total, result) in enumerate(run_caught(fail_and_go_on, world_size=size)):
        for raised, (fn, error) in zip(found, FAILING, strict=True):
            place = {fail_in_first: "rank_zero_first", fail_in_call: "rank_zero_call"}[fn]
            whole = rank == 0 or error != "Unpicklable"
            failed = f"rank 0 failed in `{place}`: Unpicklable: 5: the file is truncated"
            assert raised.seconds < 30
            assert raised.type == (error if whole else "RuntimeError")
            assert "the file is truncated" in raised.text
            assert whole or raised.text == failed
            if rank:
                assert raised.cause.startswith(f"raised on rank 0 in `{place}`:\n\nTraceback")
                assert re.search(
                    r"test_rank_zero\.py.*line \d+, in (fail_in_first|raise_it)", raised.cause
                )
            else:
                assert raised.cause == "None"
        assert (total, result) == (sum(range(size)), "7")


@pytest.mark.parametrize(("wait", "call"), [(in_first, "first"), (in_call, "call(str)")])
def test_who_waits_too_long_for_rank_0_is_told_what_to_do(wait, call):
    first, second = run_caught(wait_without, [0], wait, world_size=2, fresh=True)
    assert first is None
    assert str(second).startswith(
        f"TimeoutError: rank 0 must finish its `rank_zero_{call}` within {SOON}, but has not: give "
        f"a larger `timeout` if the work takes that long, else look at rank 0's output; "
        f"this rank waits at "
    )
    assert re.search(r"test_rank_zero\.py:\d+$", second.text)


# --- rank_zero_call


def return_what_was_on_a_gpu():
    # What a pickle says of a tensor is where it was: there is no GPU to put it on.
    with patch.object(torch.serialization, "location_tag", lambda _: "cuda:0"):
        found = rank_zero_call(lambda: {"a": [torch.arange(3.0), nn.Linear(2, 1)], "b": "text"})
    tensor, layer = found["a"]
    places = {str(tensor.device), *(str(p.device) for p in layer.parameters())}
    return tensor.tolist(), places, found["b"]


def test_tensors_come_on_the_cpu_whichever_device_they_were_on():
    assert run(return_what_was_on_a_gpu, world_size=2) == [([0, 1, 2], {"cpu"}, "text")] * 2


def test_one_process_gets_the_result_itself_pickled_or_not():
    assert callable(rank_zero_call(lambda: lambda: None))
    with pytest.raises(ValueError, match="the file is truncated"):
        rank_zero_call(raise_it, "ValueError")


LARGE = 9 * 2**20  # more than the store takes at once


def fail_largely():
    raise ValueError("é" * LARGE)


def parse_what_is_large():
    json.loads(f"[{'1,' * (LARGE // 2)}x]")


def return_and_raise_what_is_large():
    found = rank_zero_call(lambda: (b"0" * LARGE, [f"{n:012d}" for n in range(100_000)]))
    raised = [caught(rank_zero_call, fail) for fail in (fail_largely, parse_what_is_large)]
    raised.append(caught(fail_in_a_block))
    raised.append(caught(agree, world(), "here", fail_largely))
    raised.append(caught(agree, world(), "here", lambda: "x" * LARGE))
    with patch("pardata.collective._rank_zero._MOST", LARGE):
        raised.append(caught(rank_zero_call, lambda: b"0" * LARGE))
    barrier("afterwards")
    texts = [(each.type, len(each.text), each.text[:100]) for each in raised]
    return (len(found[0]), len(found[1]), found[1][-1]), texts


def fail_in_a_block():
    with rank_zero_first():
        fail_largely()


def test_a_large_result_comes_whole_and_a_large_exception_as_its_text():
    own = ["ValueError", "JSONDecodeError", "ValueError"]
    # Fresh ranks: the store of those that live on is a file, which tests of full disks keep small.
    ranks = run(return_and_raise_what_is_large, world_size=2, fresh=True)
    for rank, (result, raised) in enumerate(ranks):
        assert result == (LARGE, 100_000, "000000099999")
        kinds, lengths, texts = zip(*raised, strict=True)
        assert kinds == (*(["RuntimeError"] * 3 if rank else own), *["ValueError"] * 3)
        assert lengths[3] == LARGE
        assert all(length < 70_000 for length in lengths[: 3 * rank])
        of_rank_0 = [text.removeprefix("rank 0 failed in `rank_zero_call`: ") for text in texts]
        assert of_rank_0[0].startswith("ValueError: ééé" if rank else "ééé")
        assert "Expecting value: line 1 column 9437186" in of_rank_0[1]
        assert texts[4].startswith("what ranks compare in `here` must be at most 4 MiB, but is 9.0")
        assert texts[5].startswith(
            "what `rank_zero_call` returns must be at most 9 MiB, but is 9.0"
        )


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


def watched_error(section):
    def lose():
        raise LostError

    def raise_once():
        try:
            agree(world(), "here", lose) if section == "agree" else rank_zero_call(lose)
        except LostError as error:
            return weakref.ref(error)

    gc.collect()
    gc.disable()
    try:
        return raise_once()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("section", ["agree", "rank_zero_call"])
def test_an_error_is_gone_when_it_is_caught_and_all_that_its_frames_held_with_it(section):
    assert run(watched_error, section, world_size=2) == [True, True]


# --- what all must reach, where only one is


ALL_MUST = {
    "barrier()": barrier,
    "all_reduce_sum": lambda: all_reduce_sum(1),
    "broadcast": lambda: broadcast(1),
    "rank_zero_first(local=True)": lambda: enter(rank_zero_first(local=True)),
}


def enter(block):
    with block:
        pass


def within(outer, call):
    """Make a call of all ranks where rank 0 works for the others."""

    def first():
        with rank_zero_first(local=outer == "local"):
            ALL_MUST[call]()

    raised = caught(first if outer != "call" else lambda: rank_zero_call(ALL_MUST[call]))
    barrier("the group is usable")
    return raised


@pytest.mark.parametrize("outer", ["first", "local", "call"])
@pytest.mark.parametrize("call", ALL_MUST)
def test_a_call_of_all_ranks_while_they_wait_for_one_is_an_error_on_every_rank(call, outer):
    place = "rank_zero_call" if outer == "call" else "rank_zero_first"
    for raised in run(within, outer, call, world_size=2):
        assert str(raised) == (
            f"RuntimeError: `{call}` must be reached by every rank, but the others wait until this "
            f"rank has done its `{place}`: make the call after it, or before"
        )


def one_first_in_another():
    seen = []
    with rank_zero_first(), rank_zero_first():
        seen.append(world().rank)
    all_reduce_sum(1)
    return seen


@pytest.mark.parametrize("size", [1, 3])
def test_one_block_may_stand_in_another_as_where_a_library_has_its_own(size):
    assert run(one_first_in_another, world_size=size) == [[rank] for rank in range(size)]


def one_call_in_another():
    raised = caught(rank_zero_call, lambda: rank_zero_call(max, 1, 2))
    barrier("the group is usable")
    return raised


def test_one_call_of_rank_0_must_not_stand_in_another():
    for raised in run(one_call_in_another, world_size=2):
        assert str(raised) == (
            "RuntimeError: `rank_zero_call` must be reached by every rank, but the others wait "
            "until this rank has done its `rank_zero_call`: make the call after it, or before"
        )


def call_off_for_a_node():
    """Be told in a node's own turn of a rank elsewhere that failed, when the first one is gone."""
    here, started = world(), time.monotonic()
    if here.rank == 0:
        channel().store.wait(["at is there"], LONG)
        call_off_everywhere(here, channel(), "rank 0 failed first: boom")
        return None
    store = channel().store
    raised = caught(lambda: wait_in_a_node(store))
    return raised.type, raised.text, time.monotonic() - started < LONG.total_seconds()


def wait_in_a_node(store):
    line = _of_node(channel(), 0, 1, 2)
    store.set("at is there", "")
    turn = Turn(line, "rank_zero_first(local=True)")
    turn.decision(turn.heard(LONG))


def test_who_waits_for_the_first_rank_of_its_node_is_told_of_a_failure_anywhere():
    kind, text, is_soon = run(call_off_for_a_node, world_size=2, fresh=True)[1]
    assert (kind, is_soon) == ("RuntimeError", True)
    assert text.startswith(
        "rank 0 must finish its `rank_zero_first(local=True)`, but rank 0 failed first: boom; this "
    )

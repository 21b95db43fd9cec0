"""A collective that fails: which call and step, who did not come, who failed first, and where."""

import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched import launched, slurm_variables
from on_ranks import caught
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils.data import TensorDataset

import pardata
from pardata import all_gather, all_reduce_mean, all_reduce_sum, backward, make_loader, wrap_model
from pardata.collective._explanation import explained
from pardata.messages._failure import consequence, is_consequence
from pardata.ranks._world import channel, joined

LONG = timedelta(seconds=30)
LOST = "[x/gloo/transport/tcp/pair.cc:5] Connection closed by peer [::1]:5. This is typically so"


# --- real groups


def wait_no_longer_than(seconds):
    """Let the collectives of this group time out so soon, now that all ranks have joined."""
    pardata.barrier("all have joined", timeout=LONG)
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in (None, joined().group_of_counts):
        set_timeout(timedelta(seconds=seconds), group)


class Batches:
    """A model and the second step of an epoch, made while all are there."""

    def __init__(self):
        self.model = wrap_model(nn.Linear(1, 1))
        loader = make_loader(torch.ones(6, 1), 3, microbatch_size=1, num_workers=0)
        self.batch = list(loader)[1]

    def __call__(self):
        backward(self.model, lambda model, x: model(x).mean(), self.batch)


def mean():
    all_reduce_mean(1.0)


CALLS = {
    "all_gather": lambda: lambda: all_gather(torch.ones(2)),
    "backward": Batches,
}


def come_late(call, after):
    pardata.init(timeout=LONG)
    run = CALLS[call]()
    wait_no_longer_than(4)
    pardata.barrier("all are there", timeout=LONG)
    late = pardata.world().rank == 1
    while late and channel().store.add(after, 0) < 2:
        time.sleep(0.02)
    raised = caught(run)
    channel().store.add("ended", 1)
    pardata.barrier("all have raised", timeout=LONG)
    dist.destroy_process_group()
    return raised


def places(call):
    """Return the name of the call in its errors, and a pattern for this rank's line."""
    place = "backward (epoch 0, step 1)" if call == "backward" else call
    return (
        place,
        rf"{re.escape(place)} at \S*test_explanation\.py:\d+, (timed out|lost a connection) ",
    )


@pytest.mark.parametrize("call", CALLS)
def test_a_timeout_names_call_step_lines_and_the_ranks_that_did_not_come(call):
    outcomes = launched(come_late, call, "ended", size=3)
    place, line = places(call)
    for rank in (0, 2):
        raised = outcomes[rank]
        assert raised.text.startswith(
            f"`{place}` must be reached by every rank, but rank 1 of 3 did not come: look at the "
            f"output of rank 1 for an earlier error, or for a branch that skips this call; this "
            f"rank waits at "
        )
        assert re.search(rf"\n  ranks? [02, ]*{rank}[02, ]*: {line}after \d\.\d s\n", raised.text)
        assert "\n  rank 1: no word from it\n" in raised.text
        assert raised.type == ("TimeoutError" if "Timed out" in raised.cause else "RuntimeError")
    assert "TimeoutError" in {raised.type for raised in outcomes}
    assert "came last" in outcomes[1].text


def test_a_rank_that_comes_too_late_is_named_on_all():
    outcomes = launched(come_late, "all_gather", "failed", size=3)
    _, line = places("all_gather")
    for rank, raised in enumerate(outcomes):
        assert re.search(rf"\n  ranks? [02, ]*{rank}[02, ]*: {line}after \d\.\d s", raised.text)
        assert re.search(
            r"but rank 1 of 3 came last, when ranks? [02, ]+ had given up: see what kept it, or "
            r"give init a larger `timeout`; this rank waits at ",
            raised.text,
        )
    assert outcomes[1].type == "RuntimeError"
    assert "Connection closed by peer" in outcomes[1].cause


def be_killed(directory):
    pardata.init(timeout=LONG)
    pardata.barrier()
    rank = pardata.world().rank
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        (pardata.barrier if rank == 2 else mean)()
    except RuntimeError as error:
        (Path(directory) / str(rank)).write_text(str(error))
        sys.excepthook(type(error), error, error.__traceback__)  # nobody catches it


def test_of_a_killed_rank_and_one_that_waits_the_killed_one_is_named(tmp_path):
    # Within seconds, and without one that waits: tests/promises/faults/test_one_rank.py.
    with pytest.raises(RuntimeError, match="exit code -9"):
        launched(be_killed, str(tmp_path), size=3)
    reduced, waited = ((tmp_path / str(rank)).read_text() for rank in (0, 2))
    assert "`barrier()` must be reached by every rank, but rank 1 of 3 did not come: " in waited
    assert "rank 0" not in waited
    assert "`all_reduce_mean` must be reached by every rank, but rank 1 of 3 did not" in reduced
    assert re.search(r"\n  ranks? 0: all_reduce_mean at \S*:\d+, lost a connection ", reduced)


def lose_the_store(directory):
    pardata.init(timeout=LONG)
    pardata.barrier()
    if pardata.world().rank == 0:
        channel().store.wait(["past the barrier"], LONG)
        os.kill(os.getpid(), signal.SIGKILL)
    channel().store.set("past the barrier", "")
    raised = caught(mean)
    (Path(directory) / "outcome").write_text(f"{raised.type} {raised.seconds} {raised.text}")


def test_a_rank_that_takes_the_store_with_it_is_told_so(tmp_path):
    with pytest.raises(RuntimeError, match="exit code -9"):
        launched(lose_the_store, str(tmp_path), size=2, variables=slurm_variables)
    kind, seconds, text = (tmp_path / "outcome").read_text().split(" ", 2)
    assert (kind, float(seconds) < 20) == ("RuntimeError", True)
    assert text.startswith(
        "`all_reduce_mean` must be reached by every rank, but a connection is lost: the "
        "process that serves the group's store (rank 0, or torchrun's agent) has ended or does "
        "not answer; look at its output; this rank waits at "
    )


def lose_in(places):
    pardata.init(timeout=LONG)
    try:
        with explained("outer"):
            lose(places[pardata.world().rank])
    except RuntimeError as error:
        return str(error), is_consequence(error), consequence(error)[1]
    finally:
        dist.destroy_process_group()


def lose(place):
    with explained(place):
        torch.ops.aten._assert_scalar(False, LOST)  # raised in C++, as gloo does


def reduce_once_more(culprit):
    here = pardata.init(timeout=LONG)
    model = wrap_model(nn.Linear(2, 1), "ddp")

    def step():
        backward(model, lambda model, x: model(x).mean(), torch.ones(here.rank + 1, 2))

    for _ in range(3):  # in the second one DDP agrees on its buckets
        step()
    wait_no_longer_than(3)
    raised = caught((lambda: all_reduce_sum(1)) if here.rank == culprit else step)
    channel().store.add("raised", 1)
    pardata.barrier("all have raised", timeout=LONG)
    dist.destroy_process_group()
    return raised


@pytest.mark.parametrize("size", [3])
def test_a_rank_that_reduces_while_the_others_are_in_backward_is_told_so_on_all(size):
    # On one connection gloo would end a process, which is sent more than it expects.
    culprit = size - 1
    for rank, raised in enumerate(launched(reduce_once_more, culprit, size=size)):
        call = "all_reduce_sum" if rank == culprit else "backward"
        assert raised.type in ("TimeoutError", "RuntimeError"), raised
        assert raised.text.startswith(f"`{call}` must be reached by every rank, but the ranks are ")
        assert "in different calls: make the same calls in the same order on each" in raised.text
        where = r"at \S*test_explanation\.py:\d+, (timed out|lost a connection) after \d+\.\d s"
        assert re.search(rf"\n  rank {culprit}: all_reduce_sum {where}\n", raised.text)
        assert re.search(rf"\n  ranks? 0[\d, ]*: backward {where}\n", raised.text)


def alone_or_otherwise(case):
    here = pardata.init(timeout=LONG)
    try:
        if case == "fingerprint":
            model = wrap_model(nn.Linear(2, 1), "fsdp")
            wait_no_longer_than(3)
            return None if here.rank else caught(pardata.fingerprint, model)
        model = wrap_model(nn.Linear(2, 1), "ddp")
        numbers = TensorDataset(torch.ones(2 * here.size, 2))
        (batch,) = make_loader(numbers, 2 * here.size, microbatch_size=1)
        options = {} if here.rank else {"count": lambda batch: len(batch[0])}
        wait_no_longer_than(3)
        return caught(lambda: backward(model, lambda m, x: m(x[0]).mean(), batch, **options))
    finally:
        channel().store.add("raised", 1)
        while channel().store.add("raised", 0) < here.size:  # a lost connection would say more
            time.sleep(0.1)
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [3])
def test_a_fingerprint_of_shards_on_rank_0_alone_is_told_by_its_name(size):
    raised, *_ = launched(alone_or_otherwise, "fingerprint", size=size)
    assert raised.type == "TimeoutError"
    assert raised.text.startswith("`fingerprint` must be reached by every rank, but rank")


@pytest.mark.parametrize("size", [3])
def test_where_all_wait_for_different_things_in_one_call_the_arguments_are_suspected(size):
    for raised in launched(alone_or_otherwise, "count", size=size):
        assert raised.text.startswith("`backward (epoch 0, step 0)` must be reached by every rank")
        assert "give the call the same arguments (`count`), and the model the same" in raised.text


def test_where_one_saves_alone_all_are_told_to_save_on_every_rank():
    for text, *_ in launched(lose_in, ["Checkpointer.save", "backward"], size=2):
        assert (
            "but the ranks are in different calls: call `save` on every rank at the same step, not "
            "under `if world.is_main`; this rank waits at "
        ) in text


def test_where_all_came_the_network_is_suspected_and_the_innermost_explains():
    for rank, (text, follows, found) in enumerate(launched(lose_in, ["inner"] * 2, size=2)):
        assert text.startswith("`inner` must")
        assert "but a connection between them was lost: is the network down?; this" in text
        assert text.endswith("pair.cc:5] Connection closed by peer [::1]:5)")
        assert follows
        assert (found.own.rank, found.own.call, found.first) == (rank, "inner", None)
        assert not found.store_is_gone


# --- what is lost, and what is not


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x"), KeyboardInterrupt()])
def test_any_other_error_goes_through_as_it_is(error):
    with pytest.raises(type(error)) as raised, explained("all_gather"):
        raise error
    assert raised.value is error


def test_without_a_group_to_ask_the_error_stays_as_it_is():
    with pytest.raises(RuntimeError) as raised:
        lose("all_gather")
    assert str(raised.value) == LOST

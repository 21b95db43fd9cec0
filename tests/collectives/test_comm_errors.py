"""A collective that fails names its call and step, and the rank that failed or did not come."""

import os
import re
import signal
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
from pardata import all_reduce_mean, all_reduce_sum, backward, make_loader, wrap_model
from pardata.collectives._comm_errors import explain_comm_errors
from pardata.environment._world import group_state, store_client
from pardata.store._rank_errors import is_secondary

LONG = timedelta(seconds=30)
LOST = "[x/gloo/transport/tcp/pair.cc:5] Connection closed by peer [::1]:5. This is typically so"


# --- real groups


def wait_no_longer_than(seconds):
    """Let the collectives of this group time out so soon, now that all ranks have joined."""
    pardata.barrier("all have joined", timeout=LONG)
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in (None, group_state().cpu_group):
        set_timeout(timedelta(seconds=seconds), group)


def raised_by(make):
    """Return what this rank raises in the work that `make` prepares while all are there."""
    here = pardata.init(timeout=LONG)
    work = make(here)
    wait_no_longer_than(3)
    raised = caught(work)
    store_client().store.add("ended", 1)
    wait_for_ended(here.size)  # a lost connection would say more
    dist.destroy_process_group()
    return raised


def wait_for_ended(ranks):
    while store_client().store.add("ended", 0) < ranks:
        time.sleep(0.02)


def a_step(here, *, samples, step=0, **options):
    """Return a step of `backward` with microbatches."""
    model = wrap_model(nn.Linear(1, 1), "ddp")
    data = TensorDataset(torch.ones(samples * here.size, 1))
    batch = list(make_loader(data, here.size, microbatch_size=1, num_workers=0))[step]
    return lambda: backward(model, lambda model, x: model(x[0]).mean(), batch, **options)


def late_on_rank_1(here):
    step = a_step(here, samples=2, step=1)

    def work():
        wait_for_ended(2 if here.rank == 1 else 0)
        step()

    return work


def test_a_timeout_names_the_call_the_step_and_the_rank():
    first, _, last = launched(raised_by, late_on_rank_1, size=3)
    for raised in (first, last):
        assert raised.text.startswith(
            "`backward (epoch 0, step 1)` must be reached by every rank, but rank 1 of 3 did not "
            "come: look at the output of rank 1 for an earlier error, or for a branch that skips "
            "this call; this rank waits at "
        )
        ended = r"at \S*test_comm_errors\.py:\d+, and (timed out|lost a connection) after \d\.\d s"
        assert re.search(ended, raised.text)
        assert raised.type == ("TimeoutError" if "Timed out" in raised.cause else "RuntimeError")
    assert "TimeoutError" in {first.type, last.type}


def lose_the_store(directory):
    pardata.init(timeout=LONG)
    pardata.barrier()
    if pardata.world().rank == 0:
        store_client().store.wait(["past the barrier"], LONG)
        os.kill(os.getpid(), signal.SIGKILL)
    store_client().store.set("past the barrier", "")
    raised = caught(all_reduce_mean, 1.0)
    (Path(directory) / "outcome").write_text(f"{raised.type} {raised.seconds} {raised.text}")


def test_a_rank_that_takes_the_store_with_it_is_told_so(tmp_path):
    with pytest.raises(RuntimeError, match="exit code -9"):
        launched(lose_the_store, str(tmp_path), size=2, variables=slurm_variables)
    kind, seconds, text = (tmp_path / "outcome").read_text().split(" ", 2)
    assert (kind, float(seconds) < 20) == ("RuntimeError", True)
    assert text.startswith(
        "`all_reduce_mean` must be reached by every rank, but the process that serves the group's "
        "store (rank 0, or torchrun's agent) has ended or does not answer: look at its output; "
        "this rank waits at "
    )


def lose_rank_1(directory, strategy):
    here = pardata.init(timeout=LONG)
    # Of several buckets, so that "exact" waits for the other ranks during the backward too.
    model = wrap_model(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3))), strategy)
    (batch,) = make_loader(TensorDataset(torch.ones(6, 1024)), 6, microbatch_size=1, num_workers=0)
    backward(model, lambda model, x: model(x[0]).mean(), batch)

    def loss_fn(model, x):
        if here.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return model(x[0]).mean()

    raised = caught(backward, model, loss_fn, batch)
    (Path(directory) / f"outcome{here.rank}").write_text(f"{raised.type} {raised.text}")


@pytest.mark.parametrize("strategy", ["ddp", "exact"])
def test_ranks_raise_when_one_is_killed_and_wait_for_no_timeout(strategy, tmp_path):
    with pytest.raises(RuntimeError, match="exit code -9"):
        launched(lose_rank_1, str(tmp_path), strategy, size=3)
    for rank in (0, 2):
        text = (tmp_path / f"outcome{rank}").read_text()
        assert text.startswith("RuntimeError `backward"), text
        # On a busy machine the other rank may report later.
        assert re.search(r"every rank, but (rank 1|ranks 0, 1|ranks 1, 2) of 3 did not come", text)
        assert ", and lost a connection after " in text


def reduce_on_the_last_rank(here):
    model = wrap_model(nn.Linear(2, 1), "ddp")

    def step():
        backward(model, lambda model, x: model(x).mean(), torch.ones(here.rank + 1, 2))

    for _ in range(3):  # in the second one DDP agrees on its buckets
        step()
    return (lambda: all_reduce_sum(1)) if here.rank == here.size - 1 else step


def test_an_all_reduce_during_the_others_backward_raises_on_every_rank():
    # On one connection gloo would end a process, which is sent more than it expects.
    for rank, raised in enumerate(launched(raised_by, reduce_on_the_last_rank, size=3)):
        call = "all_reduce_sum" if rank == 2 else "backward"
        assert raised.type in ("TimeoutError", "RuntimeError"), raised
        missing = r"rank 2" if rank < 2 else r"ranks? .*"
        text = rf"`{call}` must be reached by every rank, but {missing} of 3 did not come: look "
        assert re.match(text, raised.text)


def fingerprint_on_rank_0(here):
    model = wrap_model(nn.Linear(2, 1), "fsdp")
    return (lambda: None) if here.rank else (lambda: pardata.fingerprint(model))


def test_a_timeout_names_a_fingerprint_that_one_rank_calls():
    raised, *_ = launched(raised_by, fingerprint_on_rank_0, size=3)
    assert raised.type == "TimeoutError"
    assert raised.text.startswith("`fingerprint` must be reached by every rank, but rank")


def count_on_rank_0(here):
    options = {} if here.rank else {"count": lambda batch: len(batch[0])}
    return a_step(here, samples=1, **options)


def test_a_timeout_of_different_waits_suggests_different_arguments():
    for raised in launched(raised_by, count_on_rank_0, size=3):
        assert raised.text.startswith("`backward (epoch 0, step 0)` must be reached by every rank")
        assert (
            "pass the same arguments (`count`), mode and frozen parameters on every" in raised.text
        )


# --- what a backend says


def lose(place):
    with explain_comm_errors(place):
        torch.ops.aten._assert_scalar(False, LOST)  # raised in C++, as gloo does


def lose_in(places):
    pardata.init(timeout=LONG)
    try:
        with explain_comm_errors("outer"):
            lose(places[pardata.world().rank])
    except RuntimeError as error:
        return str(error), is_secondary(error)
    finally:
        dist.destroy_process_group()


def test_a_failure_on_every_rank_suggests_the_network():
    for text, follows in launched(lose_in, ["inner"] * 2, size=2):
        assert text.startswith("`inner` must be reached by every rank, but they wait for different")
        assert "or the network is down; this rank waits at " in text
        assert "pair.cc:5] Connection closed by peer [::1]:5. This is typically so)" in text
        assert follows


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x"), KeyboardInterrupt()])
def test_any_other_error_goes_through_as_it_is(error):
    with pytest.raises(type(error)) as raised, explain_comm_errors("all_gather"):
        raise error
    assert raised.value is error


def test_without_a_group_to_ask_the_error_stays_as_it_is():
    with pytest.raises(RuntimeError) as raised:
        lose("all_gather")
    assert str(raised.value) == LOST

"""An exception that nobody catches: who failed first, on every rank, and nobody waits for long."""

import re
import sys
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from common_launch import run_all, torchrun
from launched import launched, slurm_variables, torchrun_variables
from logged import kept
from torch import nn

from pardata import backward, init, make_loader, rank_zero_call, world, wrap_model
from pardata.process_group import _shutdown

SCRIPT = """
import logging, signal, sys, time, torch, pardata
from datetime import timedelta
from pathlib import Path

CALLS = {
    "collective": lambda: pardata.all_reduce_mean(1.0),
    "barrier": lambda: pardata.barrier("epoch 3"),
    "call": lambda: pardata.rank_zero_call(str, 1),
    "stop": lambda: vote(),
    "own": lambda: torch.distributed.all_reduce(torch.ones(1)),
    "second": lambda: (after_the_second(), pardata.all_reduce_mean(1.0)),
    "later": lambda: (after_the_end(), pardata.barrier("epoch 3")),
}

def vote():
    with pardata.StopSignal() as stop:
        while not stop.agreed():
            time.sleep(0.1)

def after_the_second():
    while not pardata.environment._world.store_client().store.check(["reports"]):
        time.sleep(0.02)
    time.sleep(3)

def after_the_end():
    while not Path("0 has ended").exists():
        time.sleep(0.02)

def raise_once(*_):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    raise RuntimeError("a worker was killed")

class Interrupted(logging.StreamHandler):
    def emit(self, record):
        signal.raise_signal(signal.SIGUSR1)
        super().emit(record)

calls, how = sys.argv[1].split(","), sys.argv[2]
here = pardata.init(timeout=100)
if how == "second":  # or a busy machine takes longer than rank 0 waits
    pardata.process_group._shutdown._PATIENCE = timedelta(seconds=30)
group = torch.distributed.new_group()  # which pardata does not know
pardata.barrier("all are there")
if not calls[here.rank]:
    if how == "flight":
        work = torch.distributed.all_reduce(torch.ones(1), group=group, async_op=True)
    if how == "signal":
        signal.signal(signal.SIGUSR1, raise_once)
        logging.getLogger("pardata.process_group").addHandler(Interrupted())
    time.sleep(1)
    if how == "exit":
        with here:
            sys.exit(3)
    raise ValueError("boom\\nand more")
CALLS[calls[here.rank]]()
"""
BOOM, EXIT = "ValueError: boom (train.py:55)", "SystemExit: 3 (train.py:54)"
MUST = "must be reached by every rank, but rank 1 of 3 failed first: "
IN_BARRIER = f"RuntimeError: `barrier('epoch 3')` {MUST}"
# What the three ranks do (the empty one fails), under which launcher, and what the others say.
RUNS = {
    "waiting": ("collective,,barrier", torchrun_variables, f"`all_reduce_mean` {MUST}", IN_BARRIER),
    # One waits in the user's own collective.
    "rank 0": (
        ",call,own",
        torchrun_variables,
        "`rank_zero_call(str)` must",
        "here: train.py:11\n",
    ),
    # Rank 0 keeps the store until the others know whose fault it was.
    "second": ("collective,,second", slurm_variables, "", ""),
    # A collective under way does not keep the process that failed: the others wait for its end.
    "flight": (",later,later", torchrun_variables, "", ""),
    # The handler of a signal raises while the exception is reported.
    "signal": ("barrier,,barrier", torchrun_variables, "", IN_BARRIER),
    # An exit that is no success is told as an exception is.
    "exit": ("stop,,barrier", torchrun_variables, f"`StopSignal.agreed` {MUST}", IN_BARRIER),
}


@pytest.fixture(scope="module")
def ended(programs, tmp_path_factory):
    """Return how ranks ended that nobody else would end."""
    runs = {name: (SCRIPT, variables, calls, name) for name, (calls, variables, *_) in RUNS.items()}
    return run_all(programs, tmp_path_factory.mktemp("uncaught"), runs)


@pytest.mark.parametrize("name", RUNS)
def test_who_waits_for_whatever_says_who_failed_first(name, ended):
    calls, _, *says = RUNS[name]
    bad, exits = calls.split(",").index(""), name == "exit"
    first = EXIT if exits else BOOM
    for rank, (code, text, cause) in enumerate(ended[name]):
        (line,) = [line for line in text.splitlines() if "/3] " in line]
        assert code == (3 if exits and rank == bad else 1)
        if rank == bad:
            assert line == f"[{bad}/3] failed: {first}"
            assert ("ValueError: boom\n" in text) != exits
            assert cause.endswith("SystemExit: 3\n" if exits else "ValueError: boom\nand more\n")
        else:
            why = f"failed because rank {bad} failed first: {first}"
            assert line.startswith(f"[{rank}/3] {why}; here: train.py:")
            assert cause == f"rank {bad} of 3 failed first: {first}"
            assert "Traceback" in text
            assert says.pop(0) in text


def test_torchrun_prints_the_failure_line_before_traceback_and_root_cause(
    tmp_path, monkeypatch, short_tmp
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    done = torchrun("train.py", 2, short_tmp, "collective,", "waiting")
    assert done.returncode == 1
    before, _, after = done.stderr.partition(f"[1/2] failed: {BOOM}\n")
    assert "ValueError: boom" in after
    assert "ValueError: boom" not in before
    _, _, cause = after.partition("Root Cause")
    assert "(local_rank: 1)" in cause
    assert 'raise ValueError("boom\\nand more")\n' in cause
    assert "<N/A>" not in cause


# --- the hook


@pytest.mark.parametrize("with_a_later_one", [False, True])
def test_the_previous_excepthook_is_called_and_restored_unless_replaced(
    with_a_later_one, monkeypatch
):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *facts: seen.append(facts))
    with init(tune_cpu=False):
        ours = sys.excepthook
        later = sys.excepthook = partial(ours) if with_a_later_one else ours
    assert (sys.excepthook is later) == with_a_later_one
    later(KeyError, KeyError(), None)
    assert len(seen) == 1


def boom():
    raise ValueError("boom\nand more")


def interrupt():
    raise KeyboardInterrupt


def step(strategy, where):
    """Fail within `backward` on rank 0."""

    def fails(model, batch=None):
        if world().is_main:
            boom()
        return 1 if batch is None else model(batch).mean()

    model = wrap_model(nn.Linear(2, 1), strategy)
    (batch,) = make_loader(torch.ones(6, 2), 6, microbatch_size=1, num_workers=0)
    if where == "count":
        backward(model, lambda model, x: model(x).mean(), batch, count=fails)
    else:
        backward(model, fails, batch)


FAILING = {
    "an exception": (partial(rank_zero_call, boom), "ValueError: boom"),
    "Ctrl-C": (partial(rank_zero_call, interrupt), "KeyboardInterrupt"),
    "a loss": (partial(step, "exact", "loss_fn"), "ValueError: boom"),
    "a count": (partial(step, "ddp", "count"), "ValueError: boom"),
}


def fail_on_rank_0(call):
    init(timeout=timedelta(seconds=30))
    _, keeper = kept("pardata.process_group._shutdown")
    try:
        call()
    except BaseException as error:  # noqa: BLE001  # Ctrl-C too
        sys.excepthook(type(error), error, error.__traceback__)
    dist.destroy_process_group()
    return keeper.lines


@pytest.mark.parametrize(("call", "said"), FAILING.values(), ids=FAILING)
def test_what_rank_0_raises_and_all_hear_of_is_said_once(call, said):
    (first,), (other,) = launched(fail_on_rank_0, call, size=2)
    said = rf"{said} \(\S*test_uncaught_exceptions\.py:\d+\)"
    assert re.fullmatch(rf"\[0/2\] failed: {said}", first)
    assert re.match(rf"\[1/2\] failed because rank 0 failed first: {said}; here: ", other)


def fail_in_a_second_group():
    init(timeout=timedelta(seconds=30))
    dist.destroy_process_group()
    init(timeout=timedelta(seconds=30))
    _, keeper = kept("pardata.process_group._shutdown")
    sys.excepthook(ValueError, ValueError("boom"), None)
    dist.destroy_process_group()
    return keeper.lines


def test_the_excepthook_of_a_destroyed_group_logs_nothing():
    expected = [[f"[{rank}/2] failed: ValueError: boom (an unknown line)"] for rank in range(2)]
    assert launched(fail_in_a_second_group, size=2) == expected


def lines_before_the_report():
    init(timeout=timedelta(seconds=30))
    _, keeper = kept("pardata.process_group._shutdown")
    seen, report = [], _shutdown.report_failure
    with patch.object(
        _shutdown, "report_failure", lambda *a: (seen.extend(keeper.lines), report(*a))[1]
    ):
        sys.excepthook(ValueError, ValueError("boom"), None)
    return seen


def test_the_line_of_a_failure_is_logged_before_the_store_is_asked():
    # The watchdog of an accelerator's backend may end the process meanwhile.
    expected = [[f"[{rank}/2] failed: ValueError: boom (an unknown line)"] for rank in range(2)]
    assert launched(lines_before_the_report, size=2) == expected


# The collectives of an accelerator do not end where a peer has: here a sleep stands for one.
STUCK = """
import sys, time, pardata
from pardata.process_group import _watchdog

_watchdog._STUCK = 4.0  # longer than the store lives on
_watchdog.has_accelerator_backend = lambda backend: True
here = pardata.init(timeout=100)
pardata.barrier("all are there")
if here.rank == int(sys.argv[1]):
    raise ValueError("boom")
time.sleep(80)
"""


def test_a_rank_stuck_on_an_accelerator_ends_and_names_the_failure(programs, tmp_path):
    # Rank 0 serves the store, which ends with it.
    runs = {f"{culprit}": (STUCK, slurm_variables, f"{culprit}") for culprit in (0, 1)}
    for culprit, ended in run_all(programs, tmp_path, runs, size=2).items():
        other = 1 - int(culprit)
        assert [one.code for one in ended] == [1, 1]
        why = f"failed because rank {culprit} failed first: ValueError: boom (train.py:"
        assert f"[{other}/2] {why}" in ended[other].text
        assert "this rank waited for it" in ended[other].text


ALONE = (
    STUCK[: STUCK.index("if here.rank ==")].replace("4.0", "1.0")
    + """
import os
from pathlib import Path
if here.rank == 0:
    while not Path("1 has left the barrier").exists():  # the barrier's last answer needs the store
        time.sleep(0.02)
    os._exit(0)  # its work is done, and the store goes with it
Path("1 has left the barrier").touch()
time.sleep(3)
print("has ended its work", flush=True)
os._exit(0)
"""
)


def test_a_rank_whose_store_is_gone_without_a_failure_ends_its_work(programs, tmp_path):
    runs = {"alone": (ALONE, slurm_variables)}
    first, last = run_all(programs, tmp_path, runs, size=2)["alone"]
    assert (first.code, last.code) == (0, 0)
    assert "has ended its work" in last.text

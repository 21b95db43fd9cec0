"""An exception that nobody catches: who failed first, on every rank, and nobody waits for long."""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from launch_zoo import torchrun
from launched import agent, launched, reserved_port, slurm_variables, torchrun_variables
from logged import kept
from processes import wait_for, without_gloo

import pardata
from pardata.environment._world import GroupState
from pardata.process_group._shutdown import report_uncaught

SCRIPT = """
import logging, signal, sys, time, torch, pardata
from datetime import timedelta
from pathlib import Path

CALLS = {
    "collective": lambda: pardata.all_reduce_mean(1.0),
    "barrier": lambda: pardata.barrier("epoch 3"),
    "call": lambda: pardata.rank_zero_call(str, 1),
    "stop": lambda: vote(),
    "late": lambda: (time.sleep(3), pardata.all_gather(1.0)),
    "own": lambda: torch.distributed.all_reduce(torch.ones(1)),
    "second": lambda: (after_the_second(), pardata.all_reduce_mean(1.0)),
    "asleep": lambda: (until_told(), pardata.barrier("epoch 3")),
}

def after_the_second():
    while not pardata.environment._world.store_client().store.check(["reports"]):
        time.sleep(0.02)
    time.sleep(0.8)

def vote():
    with pardata.StopSignal() as stop:
        while not stop.agreed():
            time.sleep(0.1)

def until_told():
    while not Path("go").exists():
        time.sleep(0.02)

def raise_once(*_):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    raise RuntimeError("a worker was killed")

class Interrupted(logging.StreamHandler):
    def emit(self, record):
        signal.raise_signal(signal.SIGUSR1)
        super().emit(record)

calls, bad = sys.argv[1].split(","), int(sys.argv[2])
here = pardata.init(timeout=timedelta(seconds=100))
group = torch.distributed.new_group()  # which pardata does not know
pardata.barrier("all are there")
if here.rank == bad:
    if "flight" in sys.argv:
        work = torch.distributed.all_reduce(torch.ones(1), group=group, async_op=True)
    if "signal" in sys.argv:
        signal.signal(signal.SIGUSR1, raise_once)
        logging.getLogger("pardata.process_group").addHandler(Interrupted())
    time.sleep(1)
    if "exit" in sys.argv:
        with here:
            sys.exit(3)
    raise ValueError("boom\\nand more")
CALLS[calls[here.rank]]()
"""
BOOM, EXIT = "ValueError: boom (train.py:54)", "SystemExit: 3 (train.py:53)"


# What the three ranks do (the empty one fails), which one fails, and under which launcher.
RUNS = {
    "collective": ("collective,,late", 1, torchrun_variables),
    "barrier": ("barrier,,barrier", 1, torchrun_variables),
    "rank 0": (",call,own", 0, torchrun_variables),
    "store": (",collective,barrier", 0, slurm_variables),
    "second": ("collective,,second", 1, slurm_variables),
    "flight": ("asleep,,asleep", 1, torchrun_variables, "flight"),
    "signal": ("barrier,,barrier", 1, torchrun_variables, "signal"),
    "exit": ("stop,,barrier", 1, torchrun_variables, "exit"),
}


@pytest.fixture(scope="module")
def ended(programs, tmp_path_factory):
    """Return what ranks that nobody else would end have said: for each run, line and text."""
    folder, ranks = tmp_path_factory.mktemp("uncaught"), []
    with contextlib.ExitStack() as stack:
        for run, (calls, bad, variables, *more) in RUNS.items():
            (folder / run).mkdir()
            meeting = agent() if variables is torchrun_variables else reserved_port()
            port = stack.enter_context(meeting)
            arguments = [calls, str(bad), *more]
            for rank in range(3):
                env = variables(rank, 3, port, TORCHELASTIC_ERROR_FILE=f"{rank}.json")
                where = {"folder": folder / run, "output": folder / run / str(rank)}
                one = programs.start(SCRIPT, *arguments, **where, **env)
                ranks.append((run, bad, rank, one, arguments))
        # Far below the groups' timeout, far above what a slow machine takes.
        for run, bad, rank, one, _ in sorted(ranks, key=lambda each: each[2] != each[1]):
            one.wait(90)
            if rank == bad:
                (folder / run / "go").touch()  # who waits for it goes on when that one has ended
    found = {}
    for run, bad, rank, one, arguments in ranks:
        text = (folder / run / str(rank)).read_text()
        (line,) = [line for line in text.splitlines() if "/3] " in line]
        exits = "exit" in arguments
        if rank == bad:
            assert line == f"[{bad}/3] failed: {EXIT if exits else BOOM}"
            assert ("ValueError: boom\n" in text) != exits
        if "failed first" in line or rank == bad:
            told = json.loads((folder / run / f"{rank}.json").read_text())["message"]
            first = f"rank {bad} of 3 failed first: {EXIT if exits else BOOM}"
            own = "SystemExit: 3\n" if exits else "ValueError: boom\nand more\n"
            assert told["message"] == told["extraInfo"]["py_callstack"]
            assert told["message"].endswith(own) if rank == bad else told["message"] == first
        assert one.wait() == (3 if exits and rank == bad else 1), text
        found.setdefault(run, []).append((line, text))
    return found


MUST = "must be reached by every rank, but rank 1 of 3 failed first: "


WAITING = [
    ("collective", 0, f"`all_reduce_mean` {MUST}"),
    ("collective", 2, f"`all_gather` {MUST}"),
    # Rank 0 is still elsewhere: rank 2 does not wait for it.
    ("barrier", 0, f"RuntimeError: `barrier('epoch 3')` {MUST}"),
    ("barrier", 2, f"RuntimeError: `barrier('epoch 3')` {MUST}"),
    ("rank 0", 1, "`rank_zero_call(str)` must be reached by every rank"),
    ("rank 0", 2, "here: train.py:12\n"),  # in the user's own collective
    # Rank 0 takes the store with it.
    ("store", 2, ""),
    # Rank 0 keeps the store until the others know whose fault it was.
    ("second", 0, ""),
    ("second", 2, ""),
    # The handler of a signal raises while the exception is reported.
    ("signal", 2, f"`barrier('epoch 3')` {MUST}"),
    # An exit that is no success is told as an exception is.
    ("exit", 0, f"`StopSignal.agreed` {MUST}"),
    ("exit", 2, f"`barrier('epoch 3')` {MUST}"),
]


@pytest.mark.parametrize(("run", "rank", "text"), WAITING)
def test_who_waits_for_whatever_says_who_failed_first(ended, run, rank, text):
    line, said = ended[run][rank]
    first, bad = EXIT if run == "exit" else BOOM, RUNS[run][1]
    start = f"[{rank}/3] failed because rank {bad} failed first: {first}; here: train.py:"
    assert line.startswith(start)
    assert text in said
    assert "Traceback" in said


def test_where_rank_0_takes_the_store_with_it_all_end_and_say_what_they_know(ended):
    line, _ = ended["store"][1]  # it hears of rank 0 from rank 2, or only that it is gone
    assert (
        "the process that serves the group's store (rank 0, or torchrun's agent) has" in line
        or (f"failed because rank 0 failed first: {BOOM}" in line)
    )


def test_a_collective_under_way_does_not_keep_a_process_that_failed(ended):
    # The others went on only once it had ended.
    assert len(ended["flight"]) == 3


def test_under_torchrun_the_line_stands_before_the_traceback_which_is_its_root_cause_too(
    tmp_path, monkeypatch, short_tmp
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    done = torchrun("train.py", 2, short_tmp, "collective,", "1")
    assert done.returncode == 1
    before, _, after = done.stderr.partition(f"[1/2] failed: {BOOM}\n")
    assert "ValueError: boom" in after
    assert "ValueError: boom" not in before
    _, _, cause = after.partition("Root Cause")
    assert "(local_rank: 1)" in cause
    assert 'raise ValueError("boom\\nand more")\n' in cause
    assert "<N/A>" not in cause


STORE = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""
FAILS = """
import pathlib, time, pardata
here = pardata.init(timeout=30)
if here.rank == 1:
    pathlib.Path("here").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    raise ValueError("boom")
pardata.barrier()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process by SIGSTOP")
def test_the_others_hear_of_it_from_a_store_that_takes_a_while_to_answer(programs, tmp_path):
    store, ranks = programs.start(STORE, output=tmp_path / "port"), []
    with contextlib.ExitStack() as stack:
        stack.callback(store.kill)
        wait_for(lambda: (tmp_path / "port").read_text().endswith("\n"), often=0.02)
        for rank in range(2):
            env = torchrun_variables(rank, 2, int((tmp_path / "port").read_text()))
            where = {"folder": tmp_path, "output": tmp_path / str(rank)}
            ranks.append(programs.start(FAILS, **where, **env))
        wait_for((tmp_path / "here").exists, often=0.02)
        os.kill(store.pid, signal.SIGSTOP)
        (tmp_path / "go").touch()
        time.sleep(1.5)
        os.kill(store.pid, signal.SIGCONT)
        assert [one.wait() for one in ranks] == [1, 1]
    text = (tmp_path / "0").read_text()
    # At once, and not when its own wait times out.
    assert "must be reached by every rank, but rank 1 of 2 failed first: ValueError: boom" in text


# --- what is printed


SAME = """
import sys, pardata, torch

def shown(kind, error, trace):
    frames = 0
    while trace:
        trace, frames = trace.tb_next, frames + 1
    print(f"{kind.__name__} in {frames} frames", file=sys.stderr)

class Disk(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 7:
            raise ConnectionResetError("Connection reset by peer")
        return torch.ones(1)

def loss_fn(model, batch):
    if pardata.world().rank == 1:
        raise RuntimeError("tracker: Connection reset by peer")
    return model(batch).mean()

def train(what):
    here = pardata.init(timeout=100)
    if what == "after":
        sys.excepthook = shown
    model = pardata.wrap_model(torch.nn.Linear(1, 1))
    if what == "interrupt" and here.rank == 1:
        raise KeyboardInterrupt
    if what in ("tracker", "interrupt"):
        pardata.backward(model, loss_fn, torch.ones(1, 1))
    if what == "disk":
        for batch in pardata.make_loader(Disk(), 4, num_workers=1):
            pardata.backward(model, lambda model, x: model(x).mean(), batch)
    pardata.wrap_model(model)

what = sys.argv[1]
if what == "before":
    sys.excepthook = shown
train(what)
"""
WRAPPED = "ValueError: `model` must not be wrapped yet, but is or holds a wrapped module "


@pytest.fixture
def said(programs, tmp_path):
    """Return what each of two ranks of a script prints, and leaves for torchrun."""

    def run(what):
        with agent() as port:
            ranks = []
            for rank in range(2):
                env = torchrun_variables(rank, 2, port, TORCHELASTIC_ERROR_FILE=f"{rank}.json")
                where = {"folder": tmp_path, "output": tmp_path / str(rank)}
                ranks.append(programs.start(SAME, what, **where, **env))
            assert all(one.wait(90) for one in ranks)
        files = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
        return [without_gloo((tmp_path / str(rank)).read_text()) for rank in range(2)], [
            file["message"]["message"] for file in files
        ]

    return run


def test_what_all_raise_is_one_line_and_one_traceback_on_each(said):
    texts, files = said("twice")
    for rank, text in enumerate(texts):
        line = rf"\[{rank}/2\] failed.*{WRAPPED}.*\(train\.py:\d+\)\n"
        assert re.match(line, text)
        assert text.count("Traceback (most recent call last):\n") == 1
        assert text.splitlines()[-1].endswith("wrap once, at the outside")
    assert any(file.startswith("Traceback ") for file in files)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_of_the_users_own_gets_all_frames_on_every_rank(said, when):
    for text in said(when)[0]:
        frames = re.search(r"ValueError in (\d+) frames\n", text)
        assert frames
        assert int(frames[1]) > 5


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("tracker", r"RuntimeError: tracker: Connection reset by peer"),
        (
            "disk",
            r"RuntimeError: sample 7 could not be read on rank 1, worker 0: \w+: Connection .*",
        ),
    ],
)
def test_an_error_that_speaks_of_a_connection_is_the_cause_where_it_came_up(said, what, cause):
    texts, _ = said(what)
    assert re.match(rf"\[1/2\] failed: {cause} \(train\.py:\d+\)\n", texts[1])
    told = (
        rf"\[0/2\] failed because rank 1 failed first: {cause} \(train\.py:\d+\); here: train\.py:"
    )
    assert re.search(told, texts[0])


def test_ctrl_c_is_told_as_an_error_is(said):
    texts, _ = said("interrupt")
    assert re.match(r"\[1/2\] failed: KeyboardInterrupt \(train\.py:\d+\)\n", texts[1])
    stopped = r"rank 1 failed first: KeyboardInterrupt \(train\.py:\d+\)"
    assert re.search(rf"\[0/2\] failed because {stopped}; here: train\.py:", texts[0])


# --- the hook


def test_a_hook_that_came_later_stays(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *facts: seen.append(facts))
    before = sys.excepthook
    state = GroupState(pardata.world(), None)
    report_uncaught(state)
    ours = sys.excepthook
    later = lambda *facts: ours(*facts)  # noqa: E731, PLW0108  # a hook of somebody else
    sys.excepthook = later
    state.resources.close()
    assert sys.excepthook is later
    later(KeyError, KeyError(), None)
    assert len(seen) == 1
    assert sys.excepthook is not before


def boom():
    raise ValueError("boom\nand more")


def fail_on_rank_0(call):
    pardata.init(timeout=timedelta(seconds=30))
    _, keeper = kept("pardata.process_group._shutdown")
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        sys.excepthook(type(error), error, error.__traceback__)
    dist.destroy_process_group()
    return keeper.lines


def call_boom():
    pardata.rank_zero_call(boom)


def send_a_lock():
    pardata.broadcast(threading.Lock())


def gather_a_lock():
    pardata.all_gather("a" if pardata.world().rank else threading.Lock())


LOCK = r"TypeError: cannot pickle '_thread\.lock' object"


@pytest.mark.parametrize(
    ("call", "said"), [(call_boom, "ValueError: boom"), (send_a_lock, LOCK), (gather_a_lock, LOCK)]
)
def test_what_rank_0_raises_and_all_hear_of_is_said_once(call, said):
    (first,), (other,) = launched(fail_on_rank_0, call, size=2)
    said = rf"{said} \(\S*test_uncaught\.py:\d+\)"
    assert re.fullmatch(rf"\[0/2\] failed: {said}", first)
    assert re.match(rf"\[1/2\] failed because rank 0 failed first: {said}; here: ", other)


STEP = """
import sys, torch, pardata

def fails(model, batch=None):
    if here.rank == 1:
        raise ValueError("boom")
    return 1 if batch is None else model(batch).mean()

def loss_fn(model, batch):
    return model(batch).mean()

here = pardata.init(timeout=100)
model = pardata.wrap_model(torch.nn.Linear(2, 1), sys.argv[1])
(batch,) = pardata.make_loader(torch.ones(6, 2), 6, microbatch_size=1, num_workers=0)
if sys.argv[2] == "count":
    pardata.backward(model, loss_fn, batch, count=fails)
else:
    pardata.backward(model, fails, batch)
"""


@pytest.mark.parametrize(
    ("strategy", "where"), [("exact", "loss_fn"), ("exact", "count"), ("ddp", "count")]
)
def test_what_ranks_hear_of_in_a_step_is_said_by_the_log_too(strategy, where, programs, tmp_path):
    with agent() as port:
        ranks = [
            programs.start(
                STEP, strategy, where, output=tmp_path / str(n), **torchrun_variables(n, 3, port)
            )
            for n in range(3)
        ]
        assert [rank.wait(90) for rank in ranks] == [1, 1, 1]
    for rank in (0, 2):
        text = (tmp_path / str(rank)).read_text()
        boom = "ValueError: boom (train.py:6)"
        assert f"[{rank}/3] failed because rank 1 failed first: {boom}; here: train.py:" in text


def fail_in_a_second_group():
    pardata.init(timeout=timedelta(seconds=30))
    dist.destroy_process_group()
    pardata.init(timeout=timedelta(seconds=30))
    _, keeper = kept("pardata.process_group._shutdown")
    sys.excepthook(ValueError, ValueError("boom"), None)
    dist.destroy_process_group()
    return keeper.lines


def test_the_hook_of_a_group_that_the_user_destroyed_says_nothing_of_the_next():
    expected = [[f"[{rank}/2] failed: ValueError: boom (an unknown line)"] for rank in range(2)]
    assert launched(fail_in_a_second_group, size=2) == expected

"""The thread that looks for hangs: who tells, what is known of the silent, and that it ends."""

import logging
import os
import re
import signal
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from launched import launched, slurm_variables

import pardata
from pardata.environment._world import store_client
from pardata.process_group._watchdog import RankStatus, Watchdog, status_table
from pardata.store import _client
from pardata.store._current_op import current_op


def watchdogs():
    return [thread.name for thread in threading.enumerate()].count("pardata: watchdog")


# --- who does not answer


class Keeping(logging.Handler):
    """Writes what a rank tells into a file, and lets a rank that was stopped go on."""

    def __init__(self, file, pid):
        super().__init__()
        self.file, self.pid = Path(file), pid

    def emit(self, record):
        self.file.write_text(record.getMessage())
        os.kill(self.pid, signal.SIGCONT)


def stop_rank_0(folder):
    """Stop rank 0 while the other one waits for it, which tells."""
    here = pardata.init(hang_after=1)
    pids = pardata.all_gather(os.getpid())
    if here.rank == 0:
        store_client().store.wait(["watched"])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        log = logging.getLogger("pardata.process_group")
        log.addHandler(Keeping(f"{folder}/told", pids[0]))
        _client._MARGIN = 3.0  # in which a store that is stopped may still answer
        store_client().store.set("watched", "")
    pardata.barrier()


def test_where_rank_0_does_not_answer_another_tells(tmp_path):
    launched(stop_rank_0, str(tmp_path), size=2)
    told = (tmp_path / "told").read_text()
    assert told.startswith("[1/2] rank 1 waits for rank 0, ")
    answer = "no answer: it has ended, is stopped, or C code holds the GIL"
    assert f"\n[1/2]   rank 0: {answer}\n" in told


def test_a_store_that_does_not_answer_is_told_by_who_waits(tmp_path):
    launched(stop_rank_0, str(tmp_path), size=2, variables=slurm_variables)
    assert re.fullmatch(
        r"\[1/2\] the process that serves the group's store \(rank 0, or torchrun's agent\) does "
        r"not answer; this rank is in barrier\(\) at \S*test_watchdog\.py:\d+",
        (tmp_path / "told").read_text(),
    )


# --- goes on, whatever fails


class Raising(logging.Handler):
    """Keeps what a rank tells, and raises on the first."""

    def __init__(self, folder):
        super().__init__()
        self.told, self.folder = [], folder

    def emit(self, record):
        text = record.getMessage()
        self.told.append(text)
        (self.folder / str(len([one for one in self.told if " waits for " in one]))).touch()
        if len(self.told) == 1:
            raise RuntimeError("of a handler")


def hang_twice(folder):
    """Wait twice, in a file whose path is no text, for a rank that comes when it was told."""
    here, errors = pardata.init(hang_after=0.3), [OSError("of a look")]
    answer = Watchdog._report_self

    def fail_once(*args, **kwargs):
        if errors:
            raise errors.pop()
        answer(*args, **kwargs)

    handler = Raising(folder)
    logging.getLogger("pardata.process_group").addHandler(handler)
    wait = compile("barrier()", "/path\udce9/train.py", "exec")
    with patch.object(Watchdog, "_report_self", fail_once):
        for number in (1, 2):
            while here.rank == 1 and not (folder / str(number)).exists():
                time.sleep(0.05)
            exec(wait, {"barrier": pardata.barrier})
    return handler.told


def test_errors_of_the_watchdog_and_its_handlers_do_not_end_it(tmp_path):
    told, _ = launched(hang_twice, tmp_path, size=2, patience=60)
    tables = [text for text in told if text.startswith("[0/2] rank 0 waits for rank 1, ")]
    assert len(tables) == 2
    for text in tables:
        assert "rank 0: in barrier() at /path\udce9/train.py:1" in text


# --- as long as its group


def joined_with(after):
    with pardata.init(hang_after=after, device="cpu"):
        during = watchdogs()
    return during, watchdogs(), current_op.thread


@pytest.mark.parametrize(("after", "number"), [(None, 1), (0, 0), (2, 1)])
def test_the_watchdog_lives_as_long_as_the_group_unless_disabled(after, number):
    assert launched(joined_with, after, size=2) == [(number, 0, 0)] * 2


def destroyed():
    pardata.init(hang_after=1)
    pardata.barrier()
    (thread,) = [one for one in threading.enumerate() if one.name == "pardata: watchdog"]
    dist.destroy_process_group()
    thread.join(10)
    return thread.is_alive()


def test_it_ends_with_a_group_that_the_user_has_destroyed():
    assert launched(destroyed, size=2) == [False, False]


# --- the table


def one(rank, text="in barrier() at a.py:1", *, waits=True):
    return RankStatus(text, waits, 60.0 + rank)


def test_a_thousand_ranks_are_two_lines():
    found = {rank: one(rank) for rank in range(1024)}
    found[17] = one(17, "at a.py:2 (open, b.py:3) (step 3 of epoch 0)", waits=False)
    assert status_table(found, 1024).splitlines() == [
        "ranks 0-16, 18-1023 wait for rank 17, 1083 s so far; nothing is stopped:",
        "  ranks 0-16, 18-1023: in barrier() at a.py:1",
        "  rank 17: at a.py:2 (open, b.py:3) (step 3 of epoch 0)",
    ]


@pytest.mark.parametrize(
    ("waits", "size", "head"),
    [
        ([True, True], 2, "all ranks wait for each other, 61 s so far; nothing"),
        ([False] * 2, 2, "a step does not end (after the last one, drop the iterator of the load"),
        ([False, True], 3, "rank 1 waits for ranks 0, 2, 61 s so far; nothing"),
    ],
)
def test_the_first_line_says_who_waits_for_whom(waits, size, head):
    found = {rank: one(rank, waits=is_waiting) for rank, is_waiting in enumerate(waits)}
    assert status_table(found, size).startswith(head)

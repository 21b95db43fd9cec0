"""A run that hangs says so: who waits for whom, at which lines, and who does not answer.

In each scene the last rank keeps the others waiting until rank 0 has told of it.
"""

import logging
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import run
from torch import nn
from torch.utils.data import Dataset

import pardata
from pardata import (
    all_gather,
    all_reduce_mean,
    backward,
    barrier,
    make_loader,
    rank_zero_first,
    wrap_model,
)
from pardata.store._current_op import FORKED_LOADER, LOADER
from pardata.store._rank_format import format_ranks

AFTER = 0.7  # seconds
LATEST = 2 + 5
TOLD, OVER = Path("told"), Path("over")  # files of a test's folder
HERE = re.escape(Path(__file__).name)


def at(mark):
    """Return a pattern of the line that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, text in enumerate(lines, 1) if text.endswith(f"  # {mark}")]
    return rf"at \S*{HERE}:{number}\b"


class Log(logging.Handler):
    """Keeps what rank 0 tells, and leaves a file once that is as expected, and one at the end."""

    def __init__(self, expected, then):
        super().__init__()
        self.expected, self.then, self.texts = expected, then, []

    def emit(self, record):
        text = record.getMessage()
        self.texts.append(text)
        if not TOLD.exists() and re.search(self.expected, text):
            TOLD.touch()
            self.then()
        elif TOLD.exists() and "the run continues after" in text:
            OVER.touch()


@contextmanager
def logged(expected, then):
    logger, log = logging.getLogger("pardata.process_group"), Log(expected, then)
    logger.addHandler(log)
    yield log
    logger.removeHandler(log)


def until(file, seconds=30):
    """Wait until there is a file, or it is of no use to wait."""
    end = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.01)


def closed():
    """Return a lock that nobody gets before rank 0 has told: who waits for it is at one line."""
    (lock := threading.Lock()).acquire()
    threading.Thread(target=lambda: (until(TOLD), lock.release())).start()
    return lock


# --- what the last rank does in the middle of an epoch, and what the others do


def nothing(_scene):
    pass


def sleep(_scene):
    closed().acquire()  # sleeps


def meet(_scene):
    with suppress(TimeoutError):
        barrier("saved", timeout=3)  # meets


def skip(_scene):
    return True


def reduce(_scene):
    all_reduce_mean(1.0)  # reduces


def meet_and_reduce(scene):
    meet(scene)
    all_reduce_mean(1.0)


def receive(scene):
    dist.recv(torch.ones(1), 0, group=scene.other)  # receives


def be_stopped(_scene):
    os.kill(os.getpid(), signal.SIGSTOP)


def load_the_compiler(_scene):
    torch.compile(torch.sin, backend="eager")(torch.ones(2))


def compile_slowly(_scene):
    def slow(graph, _inputs):
        closed().acquire()  # compiles
        return graph

    torch.compile(torch.square, backend=slow)(torch.ones(2))


def lead(_scene):
    with rank_zero_first():  # follows
        if pardata.world().is_main:
            closed().acquire()  # leads


class Photos(Dataset):
    """Two samples a rank and step; the last rank's second one of step 1 takes long."""

    def __init__(self, size, how):
        self.slow, self.how, self.length = 4 * size - 1, how, 6 * size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.slow and self.how == "slow":
            closed().acquire()  # reads
        return torch.ones(2)


class Scene:
    """One rank of a run that hangs: `before` it begins to train, or in step 1."""

    def __init__(self, last=nothing, others=nothing, before=nothing, how="", workers=0):
        self.last, self.others, self.before, self.how, self.workers = (
            last, others, before, how, workers,
        )  # fmt: skip

    def __call__(self, folder, expected):
        os.chdir(folder)
        self.before(self)
        self.other = dist.new_group()
        dist.barrier()  # nobody waits for what another does first
        here = pardata.init(hang_after=AFTER)
        self.is_last, pids = here.rank == here.size - 1, all_gather(os.getpid())

        def then():
            if self.last is be_stopped:
                os.kill(pids[-1], signal.SIGCONT)
            if self.last is receive:
                dist.send(torch.ones(1), here.size - 1, group=self.other)

        with logged(expected, then) as log:
            began = self.train(here)
            until(OVER)
        return log.texts, (TOLD.stat().st_mtime if TOLD.exists() else math.inf) - began

    def train(self, here):
        model, skipped, began = wrap_model(nn.Linear(2, 1)), False, 0.0
        loader = make_loader(
            Photos(here.size, self.how), 2 * here.size, shuffle=False, drop_last=True,
            num_workers=self.workers if self.is_last else 0,
        )  # fmt: skip
        for step, batch in enumerate(loader):  # loops
            if step == 1 and (skipped := (self.last if self.is_last else self.others)(self)):
                continue
            backward(model, lambda model, x: model(x).mean(), batch)  # trains
            began = time.time() if step == 0 else began
        if skipped:
            meet(self)
            backward(model, lambda model, x: model(x).mean(), batch)
        return began


IN_STEP_1 = r"[(;] ?step 1 of epoch 0, \d s\)"
TRAIN = f"in backward {at('trains')} {IN_STEP_1}"
OF_WORKERS = FORKED_LOADER if multiprocessing.get_start_method() == "fork" else LOADER
READS = f"waits for its loader {at('reads')}"
MEETS = f"waits in barrier\\('saved'\\) {at('meets')}"
AFTER_0 = r"\(after step 0 of epoch 0, "
# The rows of the last rank, and of the others.
SCENES = {
    "sleeps": (Scene(sleep), f"is {at('sleeps')} {IN_STEP_1}", TRAIN),
    "is in a barrier": (Scene(meet), f"{MEETS} {IN_STEP_1}", TRAIN),
    "has skipped a backward": (
        Scene(skip),
        rf"{MEETS} \(\d s",
        TRAIN.replace("step 1", "step 2"),
    ),
    "reduces": (
        Scene(reduce, meet_and_reduce),
        f"waits in all_reduce_mean {at('reduces')}",
        MEETS.replace("waits ", ""),
    ),
    "receives": (
        Scene(receive),
        rf"is {at('receives')} \(recv, torch/distributed/distributed_c10d\.py:\d+",
        TRAIN,
    ),
    "is stopped": (
        Scene(be_stopped),
        "does not answer: it has ended, is stopped, or C code holds the GIL",
        TRAIN,
    ),
    "reads": (Scene(how="slow"), f"{READS} {AFTER_0}", TRAIN),
    "waits for a worker": (
        Scene(how="slow", workers=1),
        f"waits for {re.escape(OF_WORKERS)} {at('loops')}",
        TRAIN,
    ),
}
# The rank that works, and what it does; the row of the others.
LONG_WORK = {
    "compiles": (
        Scene(compile_slowly, before=load_the_compiler),
        -1,
        f"compiles {at('compiles')} {IN_STEP_1}",
        TRAIN,
    ),
    "works in rank_zero_first": (
        Scene(lead, lead),
        0,
        f"works in rank_zero_first {at('leads')} {IN_STEP_1}",
        f"in rank_zero_first {at('follows')} {IN_STEP_1}",
    ),
}


def at_sizes(names):
    """Each at one of the world sizes 2, 3 and 4."""
    return [(what, 2 + number % 3) for number, what in enumerate(names)]


@pytest.mark.parametrize(("what", "size"), at_sizes(SCENES))
def test_the_table_names_who_keeps_the_others_waiting_and_where(what, size, tmp_path):
    scene, last, others = SCENES[what]
    last = f"  rank {size - 1} {last}"
    text = told(scene, size, tmp_path, rf"(?m)^(\[.*\] )?{last}")
    head, *rows = text.split("\n")
    who = f"{format_ranks(range(size - 1))} wait{'' if size > 2 else 's'}"
    assert re.match(last, rows[1]), text
    assert re.match(f"  {who} {others}", rows[0]), text
    one = f"{who} for rank {size - 1}"
    whom = "all ranks wait in different calls" if "waits in" in last else one
    assert re.fullmatch(f"{whom}, \\d s so far; nothing is stopped:", head)
    assert len(rows) == 2


@pytest.mark.parametrize(("what", "size"), at_sizes(LONG_WORK))
def test_long_work_is_named_and_no_hang(what, size, tmp_path):
    scene, rank, works, waits = LONG_WORK[what]
    rank %= size
    who = format_ranks([other for other in range(size) if other != rank])
    rows = [f"  rank {rank} {works}", f"  {who} wait{'' if size > 2 else 's'} {waits}"]
    text = told(scene, size, tmp_path, rf"(?m)^(\[.*\] )?{rows[0]}")
    head, *found = text.split("\n")
    assert re.fullmatch(f"no hang, but long work on rank {rank}, \\d s so far:", head)
    for row, one in zip(rows[:: -1 if rank else 1], found, strict=True):
        assert re.match(row, one), text


def test_a_worker_that_hangs_is_named_in_one_process_too(tmp_path):
    row = f"  rank 0 waits for {re.escape(OF_WORKERS)} {at('loops')} {AFTER_0}"
    text = told(Scene(how="slow", workers=1), 1, tmp_path, row)
    assert text.startswith("a step does not end (after the last one, drop the iterator")


def told(scene, size, tmp_path, expected):
    """Return what rank 0 tells in a scene, once it has told what is expected."""
    (texts, seconds), *_ = run(scene, str(tmp_path), expected, world_size=size)
    assert seconds < LATEST, texts
    text = next(text for text in texts if re.search(expected, text))
    assert re.fullmatch(r"(\[0/\d\] )?the run continues after \d+ s", texts[texts.index(text) + 1])
    return re.sub(r"^\[0/\d\] ", "", text, flags=re.MULTILINE)

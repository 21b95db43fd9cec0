"""A run that hangs says so: who waits for whom, at which lines, and who does not answer.

In each scene the last rank keeps the others waiting until rank 0 has told of it.
"""

import logging
import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import run
from torch import nn
from torch.utils.data import Dataset

import pardata
from pardata import backward, barrier, make_loader, rank_zero_first, wrap_model

AFTER = 0.7  # seconds
TOLD, OVER = Path("told"), Path("over")  # files of a test's folder
HERE = re.escape(Path(__file__).name)


def at(mark):
    """Return a pattern of the line that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, text in enumerate(lines, 1) if text.endswith(f"  # {mark}")]
    return rf"at \S*{HERE}:{number}\b"


class Log(logging.Handler):
    """Keeps what rank 0 tells, and leaves a file once that is as expected, and one at the end."""

    def __init__(self, expected):
        super().__init__()
        self.expected, self.texts = expected, []

    def emit(self, record):
        text = record.getMessage()
        self.texts.append(text)
        if re.search(self.expected, text):
            TOLD.touch()
        elif TOLD.exists() and "the run continues after" in text:
            OVER.touch()


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


def nothing():
    pass


def meet():
    with suppress(TimeoutError):
        barrier("saved", timeout=3)  # meets


def join():
    (thread := threading.Thread(target=until, args=[TOLD])).start()
    thread.join()  # joins


def load_the_compiler():
    torch.compile(torch.sin, backend="eager")(torch.ones(2))


def compile_slowly():
    def slow(graph, _inputs):
        closed().acquire()  # compiles
        return graph

    torch.compile(torch.square, backend=slow)(torch.ones(2))


def lead():
    with rank_zero_first():  # follows
        if pardata.world().is_main:
            closed().acquire()  # leads


class Photos(Dataset):
    """Two samples a rank and step; the second one of step 1 takes long, if it `is_slow`."""

    def __init__(self, size, *, is_slow):
        self.is_slow, self.length = is_slow, 6 * size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == 3 and self.is_slow:
            closed().acquire()
        return torch.ones(2)


class Scene:
    """One rank of a run that hangs in step 1; `before` it does what takes long the first time."""

    def __init__(self, last=nothing, others=nothing, before=nothing, workers=0):
        self.last, self.others, self.before, self.workers = last, others, before, workers

    def __call__(self, folder, expected):
        os.chdir(folder)
        self.before()
        dist.barrier()  # nobody waits for what another does first
        here, log = pardata.init(hang_after=AFTER), Log(expected)
        logging.getLogger("pardata.process_group").addHandler(log)
        self.train(here)
        until(OVER)
        return log.texts

    def train(self, here):
        model, data = wrap_model(nn.Linear(2, 1)), Photos(here.size, is_slow=self.workers > 0)
        loader = make_loader(data, 2 * here.size, drop_last=True, num_workers=self.workers)
        for step, batch in enumerate(loader):  # loops
            if step == 1:
                (self.last if here.rank == here.size - 1 else self.others)()
            backward(model, lambda model, x: model(x).mean(), batch)  # trains


IN_STEP_1 = r"\(step 1 of epoch 0\)$"
TRAIN = f"in backward {at('trains')} {IN_STEP_1}"
SO_FAR = r"\d s so far; nothing is stopped:"
# The scene and its world size; the first line and the rows of the table, that to wait for last.
MEETS = rf"in barrier\('saved'\) {at('meets')} {IN_STEP_1}"
SCENES = {
    "is in a barrier": (
        Scene(meet), 2,
        "all ranks wait for each other",
        [f"rank 0: {TRAIN}", f"rank 1: {MEETS}"],
    ),
    "joins a thread": (
        Scene(join), 3,
        "ranks 0, 1 wait for rank 2",
        [f"ranks 0, 1: {TRAIN}",
         rf"rank 2: {at('joins')} \(\w+, threading\.py:\d+\) {IN_STEP_1}"],
    ),
    "compiles": (
        Scene(compile_slowly, before=load_the_compiler), 2,
        "rank 0 waits for rank 1",
        [f"rank 0: {TRAIN}", f"rank 1: compiling {at('compiles')} {IN_STEP_1}"],
    ),
    "works in rank_zero_first": (
        Scene(lead, lead), 3,
        "ranks 1, 2 wait for rank 0",
        [f"rank 0: in rank_zero_first {at('leads')} {IN_STEP_1}",
         f"ranks 1, 2: in rank_zero_first {at('follows')} {IN_STEP_1}"],
    ),
    "waits for a worker": (
        Scene(workers=1), 1,
        r"a step does not end \(after the last one, drop the iterator of the loader\)",
        [rf"rank 0: in its loader {at('loops')} \(after step 0 of epoch 0\)$"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("scene", "world_size", "head", "rows"), SCENES.values(), ids=SCENES)
def test_the_table_names_who_keeps_the_others_waiting_and_where(
    scene, world_size, head, rows, tmp_path
):
    expected = rf"(?m)^(\[.*\] )?  {rows[-1]}"
    texts, *_ = run(scene, str(tmp_path), expected, world_size=world_size)
    text = next(text for text in texts if re.search(expected, text))
    assert re.fullmatch(r"(\[0/\d\] )?the run continues after \d+ s", texts[texts.index(text) + 1])
    first, *found = re.sub(r"^\[0/\d\] ", "", text, flags=re.MULTILINE).split("\n")
    assert re.fullmatch(f"{head}, {SO_FAR}", first)
    for row, one in zip(rows, found, strict=True):
        assert re.match(f"  {row}", one), text

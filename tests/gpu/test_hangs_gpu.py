"""A run on GPUs that hangs says so: which rank keeps the others waiting, and at which line.

Run with ``pytest -m gpu``.
"""

import logging
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from pardata import backward, barrier, init, make_loader, wrap_model


class Keeper(logging.Handler):
    """Writes what is told into a file, which is there as a whole or not at all."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def emit(self, record):
        if not self.file.exists():
            part = self.file.with_suffix(".part")
            part.write_text(record.getMessage())
            part.rename(self.file)


def closed(file):
    """Return a lock that nobody gets before there is this file: who waits for it is at one line."""
    (lock := threading.Lock()).acquire()

    def open_it():
        end = time.monotonic() + 30
        while not file.exists() and time.monotonic() < end:
            time.sleep(0.01)
        lock.release()

    threading.Thread(target=open_it).start()
    return lock


def train(device, folder, what):
    """Let the last rank sleep, or skip a backward, in step 1; the others read their losses."""
    file = Path(folder) / "told"
    with init(device=device, hang_after=1) as here:
        logging.getLogger("pardata.process_group").addHandler(Keeper(file))
        model = wrap_model(nn.Linear(1, 1))
        loader = make_loader(torch.ones(6 * here.size, 1), 2 * here.size, shuffle=False)
        is_last, skipped = here.rank == here.size - 1, False
        for step, rows in enumerate(loader):
            if is_last and step == 1 and what == "sleeps":
                closed(file).acquire()  # sleeps
            if is_last and step == 1 and what == "skips":
                skipped = True
                continue
            loss = backward(model, lambda model, rows: model(rows).mean(), rows)  # trains
            loss.item()  # reads
        if skipped:
            closed(file).acquire()  # has skipped
            backward(model, lambda model, rows: model(rows).mean(), rows).item()
        barrier()
    return file.read_text()


def line_of(mark):
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, text in enumerate(lines, 1) if text.endswith(f"  # {mark}")]
    return rf"at \S*{Path(__file__).name}:{number}\b"


@pytest.mark.parametrize(
    "everywhere", ["gloo, two ranks on one GPU", "NCCL, two ranks"], indirect=True
)
@pytest.mark.parametrize(
    ("what", "step", "last"),
    [
        ("sleeps", 1, rf"{line_of('sleeps')} \(step 1 of epoch 0\)"),
        ("skips", 2, line_of("has skipped")),
    ],
)
def test_the_rank_that_keeps_the_others_waiting_is_named(what, step, last, everywhere, tmp_path):
    text, _ = everywhere(train, str(tmp_path), what)
    head, *rows = re.sub(r"^\[\d/2\] ", "", text, flags=re.MULTILINE).split("\n")
    # The host waits in the step, or where the loss is read.
    waits = f"(in backward {line_of('trains')}|{line_of('reads')})"
    assert re.fullmatch(rf"  rank 0: {waits} \(step {step} of epoch 0\)", rows[0]), text
    assert re.fullmatch(f"  rank 1: {last}", rows[1]), text
    who = "rank 0 waits for rank 1" if "in backward" in rows[0] else "a step does not end .*"
    assert re.fullmatch(rf"{who}, \d s so far; nothing is stopped:", head)

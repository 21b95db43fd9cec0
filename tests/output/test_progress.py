"""Progress: a bar on a terminal, lines elsewhere, and nothing on the other ranks."""

import io
import os
import struct
import subprocess
from contextlib import redirect_stderr

import pytest
import torch
from forked import python
from on_ranks import run

from pardata import make_loader, progress
from pardata.environment._logger import flush_output


class FakeTime:
    """A clock that moves only where the test says."""

    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = FakeTime()
    monkeypatch.setattr("pardata.output._progress.time", clock)
    return clock


class Batches(list):
    def batch_size(self):
        return len(self[0])


def written(capsys):
    out, err = capsys.readouterr()
    assert out == ""  # standard output is the script's own
    return err


# --- lines ---


class Lines:
    """A stream of the user's that can be written to, and nothing more."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


def test_a_stream_that_can_only_be_written_to_gets_the_lines(clock):
    with redirect_stderr(Lines()) as stream:
        flush_output()  # as at the end of a process
        for _ in progress(range(2), "epoch"):
            clock.now += 1
    assert stream.text == "epoch: 2/2 in 2.0 s\n"


def test_without_a_terminal_progress_prints_every_ten_seconds(clock, capsys):
    for _ in progress(range(25), "epoch 1"):
        clock.now += 1
    assert written(capsys) == (
        "epoch 1: 11/25 in 11.0 s\nepoch 1: 22/25 in 22.0 s\nepoch 1: 25/25 in 25.0 s\n"
    )


@pytest.mark.parametrize(
    ("items", "options", "line"),
    [
        ([], {"description": "nothing"}, "nothing: 0/0 in 0.0 s\n"),
        ((i for i in range(2)), {}, "2 in 2.0 s\n"),
        ((i for i in range(2)), {"total": 5}, "2/5 in 2.0 s\n"),
        # That of a loader is its own; one that is no number is none of ours.
        (make_loader(range(8), 4, num_workers=0), {}, "2/2 in 2.0 s, samples/s 4\n"),
        (Batches([[1, 2]]), {}, "1/1 in 1.0 s\n"),
    ],
)
def test_total_and_batch_size_default_to_those_of_the_items(items, options, line, clock, capsys):
    for _ in progress(items, **options):
        clock.now += 1
    assert written(capsys) == line


def test_values_and_samples_per_second_are_shown(clock, capsys):
    bar = progress(range(4), "train", batch_size=1000)
    for step in bar:
        clock.now += 0.5
        loss = torch.tensor(0.123456, requires_grad=True) / (step + 1)
        bar.show(loss=loss, lr=0.1, phase="warm up", step=step)
    assert written(capsys) == (
        "train: 4/4 in 2.0 s, loss 0.03086, lr 0.1, phase warm up, step 3, samples/s 2,000\n"
    )


def test_a_tensor_is_read_only_when_it_is_drawn(clock, capsys):
    class Loss:
        reads = 0

        def item(self):
            Loss.reads += 1
            return 1.0

    bar = progress(range(100))
    for _ in bar:
        bar.show(loss=Loss())
    assert "loss 1" in written(capsys)
    assert Loss.reads == 1


def test_a_loop_that_ends_early_writes_how_far_it_was(clock, capsys):
    def loop():
        for item in progress(range(5)):
            if item == 3:
                raise LookupError

    with pytest.raises(LookupError):
        loop()
    assert written(capsys) == "3/5 in 0.0 s\n"


# --- ranks ---


def _captured():
    with redirect_stderr(io.StringIO()) as err:
        bar = progress([1, 2], "on all")
        for number in bar:
            bar.show(number=number)
    return err.getvalue()


def test_only_rank_zero_writes():
    first, *others = run(_captured, world_size=3)
    assert first.startswith("on all: 2/2 in ")
    assert first.endswith(" s, number 2\n")
    assert others == ["", ""]


# --- a terminal ---

SCRIPT = """
import logging, sys
{before}
import torch
from pardata import get_logger, progress
logging.basicConfig(format="%(message)s")
bar = progress(range(3), "epoch 1", batch_size=8)
for step in bar:
    bar.show(loss=torch.tensor(0.5))
    get_logger("train").warning("step %d", step)
print("done")
"""


def on_a_terminal(before=""):
    """Run the script with standard error on a pseudo-terminal; return what was written there."""
    unix = "pseudo-terminals are Unix's"
    pty, fcntl, termios = (
        pytest.importorskip(name, reason=unix) for name in ("pty", "fcntl", "termios")
    )
    mine, theirs = pty.openpty()
    # tqdm draws nothing on a terminal of no width, as a new one is.
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    script = [python(), "-c", SCRIPT.format(before=before)]
    with subprocess.Popen(script, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        while chunk := read(mine):
            seen += chunk
        out = process.stdout.read()
    os.close(mine)
    assert process.returncode == 0, seen.decode()
    assert out == b"done\n"
    return seen.decode()


def read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:  # what Linux says when the other end was closed
        return b""


def test_on_a_terminal_it_is_a_bar_of_tqdm():
    pytest.importorskip("tqdm")
    seen = on_a_terminal()
    assert all(text in seen for text in ("\repoch 1: ", "100%", "3/3 [", "loss 0.5, samples/s "))
    assert seen.endswith("\n")
    # What a terminal shows in the end: after a carriage return the line is written over.
    shown = [line.rstrip("\r").rsplit("\r")[-1].rstrip() for line in seen.split("\n")]
    assert [line for line in shown if "step" in line] == [f"step {k}" for k in range(3)]


def test_on_a_terminal_without_tqdm_there_are_lines():
    seen = on_a_terminal(before="sys.modules['tqdm'] = None")
    *logged, line = seen.splitlines()
    assert logged == [f"step {k}" for k in range(3)]
    assert line.startswith("epoch 1: 3/3 in ")
    assert "loss 0.5, samples/s " in line

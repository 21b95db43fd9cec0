"""The quickstart's program, stopped where an epoch ends, resumes and says what it has learnt."""

import re
import signal

import pytest
from on_ranks import run
from places import DOCS

from pardata import Checkpointer

EPOCH = 25  # steps: 1,500 samples in batches of 60


def program():
    """Return the names of the program, as the page has it."""
    text = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    (block,) = (block for block in found if "StopSignal() as stop" in block)
    names = {"__name__": "quickstart"}
    exec(compile(block, "quickstart.md", "exec"), names)
    return names


def stopped_and_started_again(directory, last):
    """Stop in the step `last`; return what each start returned, and the steps that were saved."""
    names, calls = program(), []
    mean_loss = names["mean_loss"]

    def stops(model, batch):
        calls.append(1)
        if len(calls) == last:
            signal.raise_signal(signal.SIGTERM)
        return mean_loss(model, batch)

    names["mean_loss"] = stops
    first = names["main"](directory, 2)
    saved = Checkpointer(directory).steps()
    return first, saved, names["main"](directory, 2), Checkpointer(directory).steps()[-1]


@pytest.mark.parametrize("last", [EPOCH, 2 * EPOCH])
def test_a_run_stopped_in_an_epochs_last_step_ends_the_same(last, tmp_path):
    (whole,) = run(undisturbed, tmp_path / "whole", world_size=1)
    ((first, saved, again, step),) = run(
        stopped_and_started_again, tmp_path / "stopped", last, world_size=1
    )
    assert (first, saved[-1], step) == (None, last, 2 * EPOCH)
    assert again == whole > 0.8


def undisturbed(directory):
    """Train without a stop, in the process of a rank."""
    return program()["main"](directory, 2)

"""The programs of the page on migrating, and of `migrating`: before and after learn the same."""

import contextlib
import importlib.util
import io
import os
import re
import runpy
from pathlib import Path

import pytest
from launched import launched
from places import DOCS
from test_docs import blocks

FROM_PAGE = [block for block in blocks(DOCS / "migrating.md") if block.language == "python"]
PROGRAMS = Path(__file__).parent / "migrating"
# Where people come from, and which module that needs.
PEERS = {"ddp": "torch", "accelerate": "accelerate", "fabric": "lightning_fabric"}
PEERS |= {"ignite": "ignite"}


def programs(peer):
    """Return the program before and the one after."""
    if peer == "ddp":
        before, after = (block.program for block in FROM_PAGE)
        return before, after
    before, after = (PROGRAMS / f"{peer}_{when}.py" for when in ("before", "after"))
    return before.read_text(encoding="utf-8"), after.read_text(encoding="utf-8")


def as_script(file):
    """Run a program as torchrun would, and return what it printed."""
    os.chdir(Path(file).parent)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(file, run_name="__main__")
    return printed.getvalue()


def loss_of(program, size, directory):
    """Run a program on `size` ranks and return the loss that rank 0 alone prints."""
    directory.mkdir()
    file = directory / "train.py"
    file.write_text(program, encoding="utf-8")
    first, *others = launched(as_script, str(file), size=size)
    assert others == [""] * (size - 1), f"{directory.name}: {others}"
    line = r"(?s).*^loss (\d+\.\d{6})(?:, accuracy 0\.\d{4})?\n"
    printed = re.fullmatch(line, str(first), flags=re.MULTILINE)
    assert printed, f"{directory.name}: {first}"
    if "Checkpointer" in program:  # started again it finds nothing left to do
        assert launched(as_script, str(file), size=size) == [""] * size
    return float(printed[1])


@pytest.mark.parametrize("sizes", [(2,), pytest.param((1, 2), marks=pytest.mark.soak)], ids=str)
@pytest.mark.parametrize("peer", PEERS)
def test_before_and_after_learn_the_same(peer, sizes, tmp_path):
    if importlib.util.find_spec(PEERS[peer]) is None:
        pytest.skip(f"{PEERS[peer]} is not installed")
    losses = [
        loss_of(program, size, tmp_path / f"{when}-{size}")
        for when, program in zip(("before", "after"), programs(peer), strict=True)
        for size in sizes
    ]
    assert losses[0] < 2.0, "an untrained one has 2.3"
    assert losses == pytest.approx([losses[0]] * len(losses), abs=3e-6)

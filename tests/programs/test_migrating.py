"""The programs of the page on migrating: before and after learn the same, on one and two ranks."""

import contextlib
import importlib.util
import io
import os
import re
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
from launched import launched
from places import DOCS
from test_docs import Block, blocks

PAGE = DOCS / "migrating.md"
PROGRAMS = [block for block in blocks(PAGE) if block.language == "python"]


@dataclass(frozen=True)
class Migration:
    """Where people come from, which module that needs, and the page's two programs."""

    name: str
    module: str
    before: Block
    after: Block


PEERS = {"ddp": "torch", "accelerate": "accelerate", "fabric": "lightning_fabric"}
PEERS |= {"ignite": "ignite"}
MIGRATIONS = [
    Migration(name, module, *pair)
    for (name, module), pair in zip(
        PEERS.items(), zip(PROGRAMS[::2], PROGRAMS[1::2], strict=True), strict=True
    )
]


def as_script(file):
    """Run a program as torchrun would, and return what it printed."""
    os.chdir(Path(file).parent)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(file, run_name="__main__")
    return printed.getvalue()


def loss_of(block, size, directory):
    """Run a program of the page on `size` ranks and return the loss that rank 0 alone prints."""
    directory.mkdir()
    file = directory / "train.py"
    file.write_text(block.program, encoding="utf-8")
    first, *others = launched(as_script, str(file), size=size)
    assert others == [""] * (size - 1), f"{block.name}: {others}"
    line = r"(?s).*^loss (\d+\.\d{6})(?:, accuracy 0\.\d{4})?\n"
    printed = re.fullmatch(line, str(first), flags=re.MULTILINE)
    assert printed, f"{block.name}: {first}"
    if "Checkpointer" in block.text:  # started again it finds nothing left to do
        assert launched(as_script, str(file), size=size) == [""] * size
    return float(printed[1])


@pytest.mark.parametrize("sizes", [(2,), pytest.param((1, 2), marks=pytest.mark.soak)], ids=str)
@pytest.mark.parametrize("migration", MIGRATIONS, ids=PEERS)
def test_before_and_after_learn_the_same(migration, sizes, tmp_path):
    if importlib.util.find_spec(migration.module) is None:
        pytest.skip(f"{migration.module} is not installed")
    losses = [
        loss_of(block, size, tmp_path / f"{name}-{size}")
        for name, block in (("before", migration.before), ("after", migration.after))
        for size in sizes
    ]
    assert losses[0] < 2.0, "an untrained one has 2.3"
    assert losses == pytest.approx([losses[0]] * len(losses), abs=3e-6)

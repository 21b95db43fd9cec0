"""Bad inputs, tried on real ranks: what is done, what must be said, and on which ranks.

The table of them is ``errors.md``, next to this file. A row shows the code that is run, or
describes it: then the code is among the `LABELS` of a file ``misuse_*.py``, which has the names
that rows use, too.
All rows run one after the other in one group, so each shows too that the ranks are in step
after the one before.
"""

import functools
import re
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import misuse_across_ranks
import misuse_data
import misuse_models
import misuse_runs
import torch
from on_ranks import Raised, caught, run
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import pardata
from pardata import barrier, testing, world

FILES = (misuse_models, misuse_data, misuse_across_ranks, misuse_runs)
LABELS = {label: code for file in FILES for label, code in file.LABELS.items()}
# What the code of a row may use.
USED = (torch, nn, sys, threading, timedelta, Path, BatchSampler, DataLoader, DistributedSampler)
CODE = re.compile(r"`[^`]*`")
SCOPE = {each.__name__.rpartition(".")[2]: each for each in USED}
for module in (pardata, testing, *FILES):
    SCOPE |= vars(module)


@dataclass(frozen=True)
class Row:
    """One bad input, as the page has it.

    Attributes:
        name: the public name that gets it.
        shown: the code, or what describes it.
        type: of the error.
        text: … of which "…" stands for anything.
        sizes: numbers of processes at which it is wrong.
        ranks: which raise it, if not all.
        others: whether the other ranks are told which one it was.
    """

    name: str
    shown: str
    type: str
    text: str
    sizes: tuple[int, ...]
    ranks: tuple[int, ...] | None = None
    others: bool = False

    @property
    def code(self):
        return LABELS.get(self.shown, self.shown.strip("`"))

    @property
    def pattern(self):
        return re.compile(".*".join(map(re.escape, re.split(" ?… ?", self.text))), re.DOTALL)


def rows(page):
    """Yield the rows of the tables of a page."""
    name = ""
    for line in page.splitlines():
        if line.startswith("## "):
            name = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith(("| what is done", "| ---")):
            shown, error, where = map(plain, re.split(r" (?<!\\)\| ", line[2:-2]))
            kind, text = re.fullmatch(r"`(\w+)`: (.*)", error, re.DOTALL).groups()
            yield Row(name, shown, kind, text, *ranks_of(where))


def plain(cell):
    """Return what a cell of a table says, without what is Markdown's own.

    A reader would see a backslash that is inside code.
    """
    assert not re.search(r"\\[*_\[\]<>]", "".join(CODE.findall(cell))), f"\\ inside code: {cell}"
    return re.sub(r"\\([|*_\[\]<>])", r"\1", cell).replace("<br>", "\n")


def ranks_of(where):
    """Return the sizes, the ranks that raise if not all, and whether the others are told."""
    if where == "the only one":
        return ((1,),)
    ranks, sizes, told = re.fullmatch(r"(.*) of ([\d, ]*\d)(, and the others .*)?", where).groups()
    sizes = tuple(map(int, sizes.split(", ")))
    return (sizes,) if ranks == "all" else (sizes, numbers(ranks), told is not None)


def numbers(text):
    return tuple(map(int, re.findall(r"\d+", text)))


ROWS = list(rows((Path(__file__).parent / "errors.md").read_text(encoding="utf-8")))


@functools.cache
def outcomes(size):
    """Return what each of `size` ranks raised at each row that is tried in a group."""
    return run(on_this_rank, world_size=size, timeout=300)


def on_this_rank():
    here = world()
    found = {}
    for row in ROWS:
        if here.size in row.sizes and row.name not in {"init", "world"}:
            found[row] = caught(eval, row.code, {**SCOPE, "rank": here.rank})
            if not isinstance(found[row], Raised):
                found[row] = None  # what it returned
            barrier(row.code)  # the ranks are still in step
    return found


def check(row, found):
    """Show that the ranks that should have raised what they should, and no other."""
    raising = range(len(found)) if row.ranks is None else row.ranks
    for rank, outcome in enumerate(found):
        if rank not in raising and not row.others:
            assert outcome is None, outcome
            continue
        assert isinstance(outcome, Raised), f"rank {rank} was told nothing"
        assert outcome.seconds < 30
        if rank in raising:
            kind, text = own_error(outcome, row.type)
            assert kind == row.type, outcome
            assert row.pattern.fullmatch(text), outcome
        else:
            assert outcome.type == "RuntimeError", outcome
            told = rf"rank {row.ranks[0]}\b|failed on {len(row.ranks)} other rank"
            assert re.search(told, outcome.text), outcome


def own_error(outcome, kind):
    """Return the type and text of an error, or those of another rank's that it tells of."""
    text = re.sub(r"\n +", "\n", outcome.text)
    told = re.fullmatch(
        rf"rank \d+ failed in `.*?`: {kind}: (.*?)(\nrank \d+ failed in .*)?\n\(seen on .*",
        text, re.DOTALL,
    )  # fmt: skip
    return (kind, told[1]) if told and outcome.type == "RuntimeError" else (outcome.type, text)

"""Bad inputs, tried on real ranks: what is typed, what must be said, and on which ranks.

A file ``misuse_*.py`` has a table ``CASES``: for each public name the bad inputs it gets. All
cases of a file run one after the other in one group, so each shows too that the ranks are in step
after the one before. ``docs/errors.md`` is made of what they said.
"""

import functools
import importlib
import re
import socket
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from on_ranks import Raised, caught, run
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
)

import pardata
from pardata import barrier, testing, world

# What a case may use beside the names of its own file.
SCOPE = {
    **{name: getattr(pardata, name) for name in pardata.__all__},
    **{name: getattr(testing, name) for name in testing.__all__},
    "torch": torch,
    "nn": nn,
    "sys": sys,
    "threading": threading,
    "timedelta": timedelta,
    "Path": Path,
    "TensorDataset": TensorDataset,
    "RandomSampler": RandomSampler,
    "BatchSampler": BatchSampler,
    "DataLoader": DataLoader,
    "DistributedSampler": DistributedSampler,
}

ALL = (1, 3)
MANY = (3,)  # where ranks must differ, or meet


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        code: what is typed, with `SCOPE`, the names of the file and `rank`.
        type: of the error.
        says: what its text must say, in this order.
        sizes: numbers of processes at which it is wrong.
        ranks: which raise it, if not all.
        others: what the other ranks are told, if anything.
        ours: whether all of the text is pardata's, and so the same under every release of torch.
        label: what the documentation shows in place of `code`.
    """

    code: str
    type: str
    says: tuple[str, ...]
    sizes: tuple[int, ...] = ALL
    ranks: tuple[int, ...] | None = None
    others: str | None = None
    ours: bool = True
    label: str = ""

    @property
    def shown(self):
        return self.label or f"`{self.code}`"


def case(code, kind, *says, **options):
    """Return a `Case`; `says` are the fragments of its text."""
    return Case(code, kind, says, **options)


def table(module):
    """Return all cases of a file, in order."""
    return [each for cases in module.CASES.values() for each in cases]


def tried(module, one, size):
    """Return what each of `size` ranks raised at a case, or None."""
    others = [each for each in table(module) if size in each.sizes]
    outcomes = getattr(module, "outcomes", functools.partial(in_one_group, module.__name__))
    return [rank[others.index(one)] for rank in outcomes(size)]


@functools.cache
def in_one_group(name, size):
    """Try the cases of a file in one group of `size` ranks; return each rank's outcomes."""
    return run(on_this_rank, name, world_size=size, timeout=100)


def on_this_rank(name):
    module = importlib.import_module(name)
    here = world()
    found = []
    for each in table(module):
        if here.size in each.sizes:
            scope = {**SCOPE, **vars(module), "rank": here.rank}
            outcome = caught(eval, each.code, scope)
            found.append(outcome if isinstance(outcome, Raised) else None)
            barrier(each.code)  # the ranks are still in step
    return found


def parameters(module):
    """Return a case and a size for each test, with names for them."""
    return [
        pytest.param(module, each, size, id=f"{module.__name__}-{size}-{each.code[:60]}")
        for each in table(module)
        for size in each.sizes
    ]


def check(case, outcomes):
    """Show that the ranks that should have raised what they should, and no other."""
    raising = range(len(outcomes)) if case.ranks is None else case.ranks
    for rank, outcome in enumerate(outcomes):
        if rank not in raising and case.others is None:
            assert outcome is None, outcome
            continue
        assert isinstance(outcome, Raised), f"rank {rank} was told nothing"
        assert outcome.seconds < 30
        text = outcome.text
        if rank not in raising:
            assert outcome.type == "RuntimeError", outcome
            assert case.others in text, outcome
            continue
        # A rank that did nothing wrong is told of the one that did.
        if outcome.type != case.type:
            assert outcome.type == "RuntimeError", outcome
            assert re.match(rf"rank \d failed in `.*`: {case.type}: ", text), outcome
        for fragment in case.says:
            assert fragment in text, outcome
            text = text[text.index(fragment) + len(fragment) :]


# --- the page

_LONGEST = 420  # characters of a text; the rest is left out


def section(module):
    """Return a part of the page: a table for each public name."""
    lines = []
    for name, cases in module.CASES.items():
        header = "| what is done | the error | on which ranks |"
        lines += ["", f"## {name}", "", header, "| --- | --- | --- |"]
        lines += [row(module, each) for each in cases]
    return lines


def row(module, case):
    outcomes = tried(module, case, max(case.sizes))
    # Of a rank that did wrong, if the others are told of it.
    raised = [outcome for outcome in outcomes if outcome is not None]
    said = next((each for each in raised if each.type == case.type), raised[0])
    text = said.text if case.ours else " … ".join(case.says)
    if not case.ours and not said.text.endswith(case.says[-1]):
        text += " …"
    shown = in_markdown(case.shown)
    return f"| {shown} | {in_markdown(f'`{case.type}`: {stable(text)}')} | {ranks(case)} |"


def ranks(case):
    sizes = ", ".join(map(str, case.sizes))
    if case.ranks is None:
        return "the only one" if case.sizes == (1,) else f"all of {sizes}"
    told = "" if case.others is None else ", and the others get an error that names it"
    return f"rank {', '.join(map(str, case.ranks))} of {sizes}{told}"


def stable(text):
    """Leave out what is of one machine, one moment or one release of torch."""
    text = re.sub(r"/[\w./-]*/(?=[\w.-]+)", "…/", text)
    text = re.sub(r"(?<=127\.0\.0\.1:)\d+", "…", text)
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "…", text)
    text = re.sub(r"; there are .*", "; there are …", text)
    return text if len(text) <= _LONGEST else text[:_LONGEST].rsplit(" ", 1)[0] + " …"


def in_markdown(text):
    """Escape what a table would take for its own."""
    parts = re.split(r"(`[^`]*`)", text.replace("|", "\\|"))
    plain = [
        part if part.startswith("`") else re.sub(r"([*_\[\]<>])", r"\\\1", part) for part in parts
    ]
    return re.sub(r"\n *", "<br>", "".join(plain))

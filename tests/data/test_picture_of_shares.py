"""The picture of ``docs/concepts.md`` shows the shares that a loader makes."""

import re
from itertools import groupby
from pathlib import Path

import pytest
from on_ranks import run

from pardata import make_loader, world

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "shares.svg"
SAMPLE, GAP, LEFT = 32, 2, 16  # as wide as it is drawn, what is between two, where the first begins


def drawn(part, size):
    """Return which rank each of the 12 samples has in one part of the picture."""
    text = PICTURE.read_text(encoding="utf-8").split("microbatch_size=2")[part]
    rows = re.split(r"(\d+) process(?:es)?</text>", text)
    row = dict(zip(rows[1::2], rows[2::2], strict=True))[str(size)]
    boxes = re.findall(r'class="r(\d)" x="(\d+)" y="\d+" width="(\d+)"', row)
    step = SAMPLE + GAP
    return [
        int(rank)
        for rank, left, width in boxes
        for number in range(12)
        if int(left) - LEFT <= number * step < int(left) - LEFT + int(width)
    ]


def shares(microbatch_size):
    batch = next(iter(make_loader(range(12), 12, microbatch_size=microbatch_size, num_workers=0)))
    return world().rank, sum(map(len, batch)) if microbatch_size else len(batch)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(("part", "microbatch_size"), [(0, None), (1, 2)])
def test_the_picture_shows_what_each_rank_gets(part, microbatch_size, size):
    got = run(shares, microbatch_size, world_size=size)
    shown = [(rank, len([*samples])) for rank, samples in groupby(drawn(part, size))]
    assert shown == got

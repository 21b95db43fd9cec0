"""Formats lists of ranks, and tables with one line for each set of ranks with equal texts."""

from collections.abc import Sequence
from itertools import groupby

_LONG = 4  # consecutive ranks from this number on are written as a range


def format_ranks(ranks: Sequence[int]) -> str:
    """Write ``[1]`` as "rank 1" and ``[0, 2, 3, 4, 5]`` as "ranks 0, 2-5"."""
    texts: list[str] = []
    for _, numbered in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in numbered]
        texts += [f"{run[0]}-{run[-1]}"] if len(run) >= _LONG else map(str, run)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def format_rank_table(lines: Sequence[str]) -> str:
    """Return a table of one text of each rank, with equal texts in one line.

    >>> print(format_rank_table(["length=10", "length=9", "length=10"]))
      ranks 0, 2: length=10
      rank 1: length=9
    """
    sets: dict[str, list[int]] = {}
    for rank, line in enumerate(lines):
        sets.setdefault(line, []).append(rank)
    return "\n".join(f"  {format_ranks(ranks)}: {line}" for line, ranks in sets.items())

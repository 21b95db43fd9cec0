"""Who says what: ranks by number, and one line for each set of ranks that say the same."""

from collections.abc import Sequence


def ranks_text(ranks: Sequence[int]) -> str:
    """Write ``[1]`` as "rank 1" and ``[1, 2]`` as "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def table_of(lines: Sequence[str]) -> str:
    """Return a table of what each rank says, in rank order; the odd one out is easy to see.

    >>> print(table_of(["length=10", "length=9", "length=10"]))
      ranks 0, 2: length=10
      rank 1: length=9
    """
    holders: dict[str, list[int]] = {}
    for rank, line in enumerate(lines):
        holders.setdefault(line, []).append(rank)
    return "\n".join(f"  {ranks_text(ranks)}: {line}" for line, ranks in holders.items())

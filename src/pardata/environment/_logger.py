"""Rank-aware logging: a `logging.LoggerAdapter` that configures nothing."""

import logging
import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from typing import Any

import torch.distributed as dist

from pardata.environment._launchers import detect_launch

# The lines logged with `once=True`: logger, level and text.
logged_once = set[tuple[str, int, str]]()


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that knows its rank; made by `get_logger`."""

    def log(  # type: ignore[override]  # it has two more arguments
        self,
        level: int,
        msg: object,
        *args: object,
        ranks: str | Iterable[int] | None = None,
        once: bool = False,
        **kwargs: Any,
    ) -> None:
        """Log on the ranks asked for; by default rank 0 below WARNING, every rank from there."""
        if not self.isEnabledFor(level):
            return
        rank, size = _rank_and_size()
        if not _chosen(rank, level, ranks):
            return
        if once:
            # Not formatted: `logging` reports arguments that do not fit, and raises nothing.
            key = (self.logger.name, level, f"{msg} {args!r}")
            if key in logged_once:  # logged by any adapter
                return
            logged_once.add(key)
        prefix = f"[{rank}/{size}] " if size > 1 else ""
        text = prefix + str(msg).replace("\n", "\n" + prefix)
        # Plus 1, past this frame, so that the record shows the caller's file and line.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        tqdm = sys.modules.get("tqdm")
        # tqdm clears its bar for the line, and draws it again below.
        with tqdm.tqdm.external_write_mode() if tqdm else nullcontext():
            self.logger.log(level, text, *args, **kwargs)


def get_logger(name: str) -> RankLogger:
    """Return an adapter of ``logging.getLogger(name)`` that writes ``[rank/size]`` before a line.

    A single process writes no prefix. Only rank 0 writes records below WARNING; every rank writes
    WARNING and above. Each call takes two more arguments. ``ranks="all"`` or a list of ranks
    chooses other ranks, and ``once=True`` writes a line the first time only. File and line are the
    caller's.

    A line does not run into a bar of tqdm, as `progress` draws one: the bar moves below it.

    It works before `init`: the rank then comes from the launcher's variables. It touches no level,
    handler or other logger: configure ``logging`` as usual. Not collective.

    >>> get_logger("train").info("epoch %d", 1, once=True)
    """
    return RankLogger(logging.getLogger(name), {})


def flush_output() -> None:
    """Flush stdout and stderr, if they are there, as in no daemon, and can be flushed."""
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, "flush", bool)()


def _chosen(rank: int, level: int, ranks: str | Iterable[int] | None) -> bool:
    if ranks is None:
        return rank == 0 or level >= logging.WARNING
    if isinstance(ranks, str) and ranks == "all":
        return True
    chosen = [-1] if isinstance(ranks, str) or not isinstance(ranks, Iterable) else [*ranks]
    # A rank above this world's size may exist in a larger world.
    if not all(isinstance(number, int) and number >= 0 for number in chosen):
        raise ValueError(f"`ranks` must be 'all' or a list of ranks, but is {ranks!r}")
    return rank in chosen


def _rank_and_size() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    with suppress(ValueError):  # `init` reports invalid variables; a log line never fails
        launch = detect_launch(os.environ)
        return launch.rank, launch.size
    return 0, 1

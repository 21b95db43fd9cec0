"""Where a rank is when a run stalls, and the table of all ranks."""

from collections.abc import Mapping
from time import monotonic
from types import FrameType
from typing import NamedTuple

from pardata.store._caller import Frame, frames_of, location, user_frame
from pardata.store._current_op import LOADER, OpRecord, current_op
from pardata.store._rank_format import format_rank_table, format_ranks

_NO_ANSWER = "no answer: it has ended, is stopped, or C code holds the GIL"


class RankStatus(NamedTuple):
    """Where a rank is, as plain data.

    Attributes:
        text: in which call of pardata, at which line, and in which step of a loader.
        waits: whether it waits for the others in that call.
        seconds: since it has made progress.
    """

    text: str
    waits: bool
    seconds: float


def rank_status(record: OpRecord, frame: FrameType) -> RankStatus:
    """Return where this rank is, from the record and the innermost frame of its training thread."""
    call, since, step = record
    frames = frames_of(frame)
    own = user_frame(frames)
    # Else pardata has called code of the user's, which is at work.
    is_inside = any(one.package == "pardata" for one in frames[own:])
    compiles = any(one.package == "torch" and _compiles(one) for one in frames)
    waits = is_inside and call not in ("", LOADER) and not (compiles or current_op.leads)
    text = f"at {frames[own].place if is_inside else location(frames)}"
    if is_in := current_op.leads or call:
        text = f"in {is_in} {text}"
    if compiles:
        text = f"compiling {text}"
    if step:
        after = "after " * (call == LOADER)
        text = f"{text} ({after}step {step.number} of epoch {step.epoch})"
    return RankStatus(text, waits, monotonic() - since)


def _compiles(frame: Frame) -> bool:
    """Return whether torch.compile is at work, and not its result."""
    return "/convert_frame.py:" in frame.place or frame.function.startswith("compile_fx")


def status_table(found: Mapping[int, RankStatus], size: int) -> str:
    """Return who waits for whom, and a line for each set of ranks that are at the same place."""
    waiting = [rank for rank in found if found[rank].waits]
    others = [rank for rank in range(size) if rank not in waiting]
    who = "all ranks wait for each other"
    if not waiting:
        who = "a step does not end (after the last one, drop the iterator of the loader)"
    elif others:
        who = f"{format_ranks(waiting)} wait{'s' * (len(waiting) == 1)} for {format_ranks(others)}"
    seconds = max(found[rank].seconds for rank in waiting or found)
    rows = [found[rank].text if rank in found else _NO_ANSWER for rank in range(size)]
    return f"{who}, {seconds:.0f} s so far; nothing is stopped:\n{format_rank_table(rows)}"

"""Where a rank is when a run stalls, and the table of all ranks."""

from collections.abc import Mapping, Sequence
from time import monotonic
from types import FrameType
from typing import NamedTuple

from pardata.store._caller import Frame, frames_of, location, user_frame
from pardata.store._current_op import FORKED_LOADER, LOADER, OpRecord, current_op
from pardata.store._rank_format import format_ranks, group_ranks_by

_PLURAL = {"is": "are", "waits": "wait", "works": "work", "compiles": "compile"}

_LOADERS = (LOADER, FORKED_LOADER)


class RankStatus(NamedTuple):
    """Where a rank is, as plain data.

    Attributes:
        kind: "waits" for the others, "leads" while they wait, "compiles", or "" for anything else.
        text: what it does, and at which line.
        call: of pardata, that it is in, or leads.
        step: of a loader, that it is in.
        seconds: since it has made progress.
    """

    kind: str
    text: str
    call: str
    step: str
    seconds: float


def rank_status(record: OpRecord, frame: FrameType) -> RankStatus:
    """Return where this rank is, from the record and the innermost frame of its training thread."""
    call, since, step = record
    frames = frames_of(frame)
    own = user_frame(frames)
    # Else pardata has called code of the user's, which is at work.
    is_inside = any(one.package == "pardata" for one in frames[own:])
    kind, does = "", "is"
    if any(one.package == "torch" and _compiles(one) for one in frames):
        kind = does = "compiles"
    elif current_op.leads:
        kind, call = "leads", current_op.leads
        does = f"works in {call}"
    elif call in _LOADERS:
        does = f"waits for {call}"
    elif call:
        kind = "waits" if is_inside else ""
        does = f"{kind or 'is'} in {call}"
    text = f"{does} at {frames[own].place if is_inside else location(frames)}"
    after = "after " * (call in _LOADERS)
    when = f"{after}step {step.number} of epoch {step.epoch}" if step else ""
    return RankStatus(kind, text, call, when, monotonic() - since)


def _compiles(frame: Frame) -> bool:
    """Return whether torch.compile is at work, and not its result."""
    return "/convert_frame.py:" in frame.place or frame.function.startswith("compile_fx")


def status_table(found: Mapping[int, RankStatus], size: int) -> str:
    """Return who waits for whom, and a line for each set of ranks that are at the same place."""
    silent = [rank for rank in range(size) if rank not in found]
    lines = [(s[0], f"  {format_ranks(s)} {_NO_ANSWER[len(s) > 1]}") for s in [silent] if s]
    alike = group_ranks_by((rank, (one.text, one.step)) for rank, one in found.items())
    for (text, step), ranks in alike.items():
        verb, _, rest = text.partition(" ")
        verb = _PLURAL.get(verb, verb) if len(ranks) > 1 else verb
        seconds = f"{max(found[rank].seconds for rank in ranks):.0f} s"
        more = ", ".join(filter(None, [step, seconds]))
        rest = f"{rest[:-1]}; {more})" if rest.endswith(")") else f"{rest} ({more})"
        lines.append((ranks[0], f"  {format_ranks(ranks)} {verb} {rest}"))
    return "\n".join([_summary(found, silent), *(line for _, line in sorted(lines))])


_NO_ANSWER = (
    "does not answer: it has ended, is stopped, or C code holds the GIL",
    "do not answer: they have ended, are stopped, or C code holds the GIL",
)


def _summary(found: Mapping[int, RankStatus], silent: Sequence[int]) -> str:
    waits = [rank for rank in found if found[rank].kind == "waits"]
    others = sorted([*silent, *(rank for rank in found if rank not in waits)])
    kinds = {found[rank].kind if rank in found else "silent" for rank in others}
    places = {(found[rank].call, found[rank].step) for rank in waits}
    # A rank that waits in `rank_zero_call` also says the function.
    led = tuple(one.call for one in found.values() if one.kind == "leads")
    seconds = f"{max(found[rank].seconds for rank in waits or found):.0f} s so far"
    has_reason = all(call.startswith(led or call) for call, _ in places)
    if others and kinds <= {"leads", "compiles"} and has_reason:
        return f"no hang, but long work on {format_ranks(others)}, {seconds}:"
    who = "a step does not end (after the last one, drop the iterator of the loader)"
    if waits and others:
        who = f"{format_ranks(waits)} wait{'s' * (len(waits) == 1)} for {format_ranks(others)}"
    elif waits:
        who = f"all ranks wait in {'the same call' if len(places) == 1 else 'different calls'}"
    return f"{who}, {seconds}; nothing is stopped:"

"""Where the ranks are when a run hangs: what each says of itself, and one table of all."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from time import monotonic
from types import FrameType
from typing import Any, TypeAlias

from pardata.store._caller import Call, calls_of, own_call, standing
from pardata.store._current_op import LOADER, Note, doing
from pardata.store._rank_format import ranks_by, ranks_text

_PLURAL = {"is": "are", "waits": "wait", "works": "work", "compiles": "compile"}


@dataclass
class Whereabouts:
    """Where a rank is, as plain data that fits in JSON.

    Attributes:
        hang: in which one it says so: they are numbered.
        kind: "waits" for the others, "leads" while they wait, "compiles", or "" for anything else.
        text: what it does, and at which line.
        call: of pardata, that it is in, or leads.
        step: of a loader, that it is in.
        seconds: since it has got on.
        stack: the calls that its thread is in, outermost first.
    """

    hang: int
    kind: str
    text: str
    call: str
    step: str
    seconds: float
    stack: list[Call]

    @classmethod
    def of(cls, facts: dict[str, Any]) -> "Whereabouts":
        """Return what another rank has told in JSON."""
        return cls(**{**facts, "stack": [Call(*call) for call in facts["stack"]]})


Found: TypeAlias = Mapping[int, Whereabouts]  # by ranks


def whereabouts(hang: int, note: Note, frame: FrameType) -> Whereabouts:
    """Say where this rank is, from its note and the innermost frame of the thread that trains."""
    call, since, step = note
    calls = calls_of(frame)
    own = own_call(calls)
    # Else pardata has called code of the user's, which is at work.
    is_inside = any(one.whose == "pardata" for one in calls[own:])
    kind, does = "", "is"
    if any(one.whose == "torch" and _compiles(one) for one in calls):
        kind = does = "compiles"
    elif doing.leads:
        kind, call = "leads", doing.leads
        does = f"works in {call}"
    elif call == LOADER:
        does = f"waits for {LOADER}"
    elif call:
        kind = "waits" if is_inside else ""
        does = f"{kind or 'is'} in {call}"
    text = f"{does} at {calls[own].place if is_inside else standing(calls)}"
    after = "after " * (call == LOADER)
    when = f"{after}step {step.number} of epoch {step.epoch}" if step else ""
    return Whereabouts(hang, kind, text, call, when, monotonic() - since, calls)


def _compiles(call: Call) -> bool:
    """Return whether torch.compile is at work, and not what it has made."""
    return "/convert_frame.py:" in call.place or call.function.startswith("compile_fx")


def headline(found: Found, silent: Collection[int]) -> tuple[str, bool]:
    """Return who waits for whom, and whether that is a hang."""
    waits = [rank for rank in found if found[rank].kind == "waits"]
    others = sorted([*silent, *(rank for rank in found if rank not in waits)])
    kinds = {found[rank].kind if rank in found else "silent" for rank in others}
    places = {(found[rank].call, found[rank].step) for rank in waits}
    # A rank that waits in `rank_zero_call` also says the function.
    led = tuple(one.call for one in found.values() if one.kind == "leads")
    seconds = f"{max(found[rank].seconds for rank in waits or found):.0f} s so far"
    has_reason = all(call.startswith(led or call) for call, _ in places)
    if others and kinds <= {"leads", "compiles"} and has_reason:
        return f"no hang, but long work on {ranks_text(others)}, {seconds}:", False
    who = "a step does not end"
    if waits and others:
        who = f"{ranks_text(waits)} wait{'s' * (len(waits) == 1)} for {ranks_text(others)}"
    elif waits:
        who = f"all ranks wait in {'the same call' if len(places) == 1 else 'different calls'}"
    return f"{who}, {seconds}; nothing is stopped:", True


def table(found: Found, silent: Mapping[int, str]) -> list[str]:
    """Return a line for each set of ranks that are at the same place, and for who is silent."""
    lines = [(rank, f"  rank {rank} {text}") for rank, text in silent.items()]
    alike = ranks_by((rank, (one.text, one.step)) for rank, one in found.items())
    for (text, step), ranks in alike.items():
        verb, _, rest = text.partition(" ")
        verb = _PLURAL.get(verb, verb) if len(ranks) > 1 else verb
        seconds = f"{max(found[rank].seconds for rank in ranks):.0f} s"
        more = ", ".join(filter(None, [step, seconds]))
        rest = f"{rest[:-1]}; {more})" if rest.endswith(")") else f"{rest} ({more})"
        lines.append((ranks[0], f"  {ranks_text(ranks)} {verb} {rest}"))
    return [line for _, line in sorted(lines)]


def stacks(found: Found, *, fold: bool) -> list[str]:
    """Return the stacks, once for each set of ranks that have the same."""
    lines_of = _folded if fold else _unfolded
    alike = ranks_by((rank, tuple(lines_of(one.stack))) for rank, one in found.items())
    return ["\n".join([f"{ranks_text(ranks)}:", *lines]) for lines, ranks in alike.items()]


def _folded(stack: list[Call]) -> list[str]:
    """Return a stack in lines, one for what is of one library, except for the innermost call."""
    lines: list[str] = []
    for whose, calls in groupby(stack[:-1], lambda call: call.whose):
        many = list(calls)
        count = f"  … {len(many)} frame{'s' * (len(many) > 1)} of {whose}"
        lines += [count] if whose else _unfolded(many)
    return lines + _unfolded(stack[-1:])


def _unfolded(stack: list[Call]) -> list[str]:
    """Return a stack in lines."""
    return [f"  {call.place} in {call.function}" for call in stack]

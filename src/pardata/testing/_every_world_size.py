"""Does a training function do the same at every world size, and if not, where do they part?"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.testing import assert_close
from typing_extensions import TypeVarTuple, Unpack

from pardata.messages._table import ranks_text
from pardata.strategies._weights import named_tensors
from pardata.testing._run import run
from pardata.values._arguments import kind_of

Args = TypeVarTuple("Args")

# What training has come to after a step.
Trained: TypeAlias = nn.Module | Mapping[str, Tensor | float]

_Step: TypeAlias = dict[str, Tensor]
_Near: TypeAlias = tuple[float, float]  # rtol and atol

# How many tensors an error lists.
_LISTED = 8


def assert_same_at_every_world_size(
    train: Callable[[Unpack[Args]], Iterable[Trained]],
    *args: Unpack[Args],
    sizes: Iterable[int] = (1, 2, 3),
    rtol: float = 0.0,
    atol: float = 0.0,
    timeout: float = 120,
) -> None:
    """Raise where training is not the same at each world size: after which step, where, how much.

    ``train(*args)`` is your training function, with ``yield model`` after ``optimizer.step()``: a
    generator function. It runs at each of the sizes, on processes of its own as with `run`, to its
    end: let it take a few steps. What each rank yields is compared, step by step, with what rank 0
    yielded at the first size. Of a model its parameters and buffers are compared, under every
    strategy. For anything else, as gradients or losses, yield a dict of tensors or numbers.

    Args:
        train: importable by name, as for `run`.
        args: handed to it.
        sizes: numbers of processes. All ranks are compared with rank 0 of the first size, its other
            ranks too.
        rtol: by how much a floating-point number may differ, relative to what it is compared with.
            With 0 and an `atol` of 0 every bit must be the same, except for NaN and the sign of 0.
            Whole numbers must always be equal.
        atol: by how much beyond that.
        timeout: seconds for each size.

    Raises:
        AssertionError: training differs. The error names the first such step, the size, the rank,
            and the tensors that differ, by how much.
        TypeError: `train` yields neither a module nor a dict of tensors or numbers.
        ValueError: there are fewer than two sizes, a tolerance is none, or `train` yields nothing.
        BaseException: what `train` raises, as from `run`.

    >>> assert_same_at_every_world_size(iter, [{"weight": torch.ones(2)}], sizes=(1, 2))
    """
    for name, tolerance in {"rtol": rtol, "atol": atol}.items():
        if not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
            raise ValueError(
                f"`{name}` must be a finite number from 0 up, but is {tolerance!r}: pass 1e-6, say"
            )
    sizes = list(sizes)
    if len(sizes) < 2:
        raise ValueError(
            f"`sizes` must be two or more, to be compared, but is {sizes}: add another"
        )
    reference: list[_Step] = []
    for size in sizes:
        found = run(_recorded, train, args, world_size=size, timeout=timeout)
        reference = reference or found[0]
        if not reference:
            raise ValueError(
                "`train` must yield after each step, but yielded nothing: let it take a step"
            )
        compared = [_parting(steps, reference, (rtol, atol)) for steps in found]
        partings = {rank: parting for rank, parting in enumerate(compared) if parting}
        if partings:
            rank, (step, text) = min(partings.items(), key=lambda item: item[1][0])
            first = f", first on rank {rank}" if len(partings) > 1 else ""
            raise AssertionError(
                f"training must be the same at every world size, but with {size} processes it is "
                f"not as with {sizes[0]}, on {ranks_text([*partings])}{first}, from step {step} "
                f"on: {text}"
            )


def difference(ours: Tensor, theirs: Tensor, near: _Near) -> str:
    """Say how two tensors differ, if they do by more than that: whole numbers in anything."""
    is_whole = not (theirs.is_floating_point() or theirs.is_complex())
    rtol, atol = (0.0, 0.0) if is_whole else near
    try:
        assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return "; ".join(line for line in str(error).splitlines()[1:] if line) or str(error)
    return ""


def _recorded(train: Any, args: Any) -> list[_Step]:
    """Return what this rank yields after each step."""
    steps = train(*args)
    if not isinstance(steps, Iterable) or isinstance(steps, nn.Module | Mapping | Tensor):
        raise TypeError(
            f"`train` must be a generator function, but returned {kind_of(steps)}: write "
            f"`yield model` after each step"
        )
    return [_tensors(trained) for trained in steps]


def _parting(ours: list[_Step], theirs: list[_Step], near: _Near) -> tuple[int, str] | None:
    """Return after which step a rank is no longer what it should be, and how it differs."""
    for step, pair in enumerate(zip(ours, theirs, strict=False), start=1):
        if text := _difference(*pair, near):
            return step, text
    done, steps = len(ours), len(theirs)
    text = f"it took {done} steps in all, not {steps}"
    return None if done == steps else (min(done, steps), text)


def _difference(ours: _Step, theirs: _Step, near: _Near) -> str:
    if list(ours) != list(theirs):
        names = sorted(ours.keys() ^ theirs.keys()) or "their order"
        return f"the names of the tensors differ in {names}"
    found = ((name, difference(ours[name], theirs[name], near)) for name in ours)
    lines = [f"  `{name}`: {text}" for name, text in found if text]
    if not lines:
        return ""
    more = [f"  and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return (
        f"{len(lines)} of {len(ours)} tensors differ:\n"
        + "\n".join([*lines[:_LISTED], *more])
        + "\nRelative differences of 1e-7 in float32 (1e-16 in float64) are sums in another order: "
        "pass `rtol` and `atol`, or train with strategy='exact'. Larger ones are shares that are "
        "weighted wrongly, statistics of one share, or random numbers that depend on the rank."
    )


def _tensors(trained: Any) -> dict[str, Tensor]:
    """Return copies of what was yielded: the next step changes it."""
    must = "`train` must yield its model, or a dict of tensors or numbers, after each step"
    if isinstance(trained, nn.Module):
        trained = dict(named_tensors(trained))
    if not isinstance(trained, Mapping):
        raise TypeError(f"{must}, but yielded {kind_of(trained)}: write `yield model`")
    tensors = {str(name): _tensor(value, name, must) for name, value in trained.items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _tensor(value: Any, name: Any, must: str) -> Tensor:
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=None if isinstance(value, int) else torch.float64)
    if not isinstance(value, Tensor):
        raise TypeError(f"{must}, but {name!r} in its dict is {kind_of(value)}: leave it out")
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.to_dense() if whole.layout != torch.strided else whole

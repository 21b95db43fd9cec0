"""Does a training function do the same at every world size, and if not, where do they part?"""

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pardata._running import run
from pardata._weights import named_tensors

Trained: TypeAlias = nn.Module | Mapping[str, Tensor]


def assert_same_at_every_size(
    train: Callable[..., Iterable[Trained]],
    *args: Any,
    sizes: Iterable[int] = (1, 2, 3),
    rtol: float = 0.0,
    atol: float = 0.0,
    timeout: float = 120,
) -> None:
    """Raise where training is not the same at each world size: after which step, where, how much.

    ``train(*args)`` is a generator function that yields its model, or a dict of tensors, after each
    step. It runs at each of the sizes, on processes of its own as with `run`; each rank's tensors
    are compared with those of rank 0 at the first size, which are kept in a temporary directory.

    Args:
        train: importable by name, as for `run`.
        args: handed to it.
        sizes: numbers of processes; the first is what the others are compared with.
        rtol: by how much a number may differ, relative to what it is compared with. With 0 and
            an `atol` of 0 every bit must be the same, but for NaN and the sign of 0.
        atol: by how much beyond that.
        timeout: seconds for each size.

    Raises:
        AssertionError: names the size, the rank, the step, and the tensor that differs most.
        ValueError: for fewer than two sizes.
        BaseException: what `train` raises, as from `run`.

    >>> assert_same_at_every_size(zip, sizes=(1, 2))  # trains nothing, and so the same
    """
    reference, *others = sizes
    if not others:
        msg = f"`sizes` must be two or more, to be compared, but is {[reference]}: add another"
        raise ValueError(msg)
    with tempfile.TemporaryDirectory(prefix="pardata-sizes-") as directory:
        steps = run(_record, train, args, directory, world_size=reference, timeout=timeout)[0]
        for size in others:
            tolerance = Tolerance(rtol, atol)
            job = train, args, directory, steps, tolerance
            found = run(_compare, *job, world_size=size, timeout=timeout)
            for rank, difference in enumerate(found):
                if difference is not None:
                    msg = (
                        f"training must be the same at every world size, but rank {rank} of {size} "
                        f"is not as rank 0 of {reference}: {difference}"
                    )
                    raise AssertionError(msg)


@dataclass(frozen=True)
class Tolerance:
    """By how much numbers may differ."""

    rtol: float
    atol: float

    def difference(self, ours: Tensor, theirs: Tensor) -> str | None:
        """Say how far apart two tensors are, if that is too far."""
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            return (
                f"{tuple(ours.shape)} of {ours.dtype}, not {tuple(theirs.shape)} of {theirs.dtype}"
            )
        near = torch.isclose(ours, theirs, self.rtol, self.atol, equal_nan=True)
        if near.all():
            return None
        wide = torch.promote_types(ours.dtype, torch.float64)  # complex stays complex
        apart = (ours.to(wide) - theirs.to(wide)).abs()[~near]
        relative = apart / theirs.to(wide).abs()[~near]
        return (
            f"{len(apart)} of {near.numel()} numbers differ, by up to {apart.max():.3g} (relative: "
            f"{relative.max():.3g})"
        )


def _record(train: Any, args: Any, directory: str) -> int:
    """Write what is yielded after each step, on rank 0; return how many steps there were."""
    steps = 0
    for steps, trained in enumerate(train(*args), start=1):
        tensors = _tensors(trained)
        if torch.distributed.get_rank() == 0:
            torch.save(tensors, _file(directory, steps))
    return steps


def _compare(train: Any, args: Any, directory: str, steps: int, tolerance: Tolerance) -> str | None:
    """Return the first difference to what was written, and train to the end, as the others do."""
    first: str | None = None
    done = 0
    for done, trained in enumerate(train(*args), start=1):
        ours = _tensors(trained)
        if first is None and done <= steps:
            first = _difference(done, ours, torch.load(_file(directory, done)), tolerance)
    if first is None and done != steps:
        first = f"it ended after {done} steps, not after {steps}"
    return first


def _difference(
    step: int, ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: Tolerance
) -> str | None:
    if list(ours) != list(theirs):
        names = sorted(ours.keys() ^ theirs.keys()) or "their order"
        return f"after step {step} the names of the tensors differ in {names}"
    found = {name: tolerance.difference(ours[name], theirs[name]) for name in ours}
    differing = {name: text for name, text in found.items() if text is not None}
    if not differing:
        return None
    name, text = next(iter(differing.items()))
    return (
        f"they first differ after step {step}, in `{name}`: {text}; in all in {len(differing)} of "
        f"{len(ours)} tensors ({', '.join(list(differing)[:8])})"
    )


def _tensors(trained: Trained) -> dict[str, Tensor]:
    named = named_tensors(trained) if isinstance(trained, nn.Module) else trained.items()
    # Copies: the next step changes them.
    return {name: tensor.detach().cpu().clone() for name, tensor in named}


def _file(directory: str, step: int) -> Path:
    return Path(directory) / f"step-{step}.pt"

"""Runs a training function at several world sizes, and compares the steps of all ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, TypeVarTuple, Unpack

from torch import Tensor, nn
from torch.testing import assert_close

from pardata.strategies._weights import named_tensors
from pardata.testing._run import run

Args = TypeVarTuple("Args")


def assert_same_at_every_world_size(
    train: Callable[[Unpack[Args]], Iterator[nn.Module | Mapping[str, Tensor | float]]],
    *args: *Args,
    sizes: Iterable[int] = (1, 2, 3),
    rtol: float = 0.0,
    atol: float = 0.0,
    timeout: float = 120,
) -> None:
    """Raise where training is not the same at each world size: on which rank, after which step.

    ``train(*args)`` is your training function, with ``yield model`` after ``optimizer.step()``: a
    generator function. It runs at each of the sizes, on processes of its own as with `run`, to its
    end: let it take a few steps. `torch.testing.assert_close` compares each rank's steps with those
    of rank 0 at the first size. Of a model it compares parameters and buffers, under every
    strategy. For anything else, as gradients or losses, yield a dict of tensors or numbers.

    Relative differences of 1e-7 in float32 (1e-16 in float64) are sums in another order: pass
    `rtol` and `atol`, or train with ``strategy="exact"``. Larger ones are shares that are weighted
    wrongly, statistics of one share, or random numbers that depend on the rank.

    Args:
        train: importable by name, as for `run`.
        args: handed to it.
        sizes: numbers of processes, two or more.
        rtol: by how much a number may differ, relative to what it is compared with. With 0 and an
            `atol` of 0 every bit must be the same, except for NaN and the sign of 0.
        atol: by how much beyond that.
        timeout: seconds for each size.

    Raises:
        AssertionError: training differs. The error names the size, the rank, its first such step,
            and a tensor that differs, by how much.
        ValueError: there are fewer than two sizes, or `train` yields nothing.
        BaseException: what `train` raises, as from `run`.

    >>> import torch
    >>> assert_same_at_every_world_size(iter, [{"weight": torch.ones(2)}], sizes=(1, 2))
    """
    sizes = list(sizes)
    if len(sizes) < 2:
        raise ValueError(f"`sizes` must be two or more, but is {sizes}: add another")
    ranks = [
        (f"rank {rank} of {size}", steps)
        for size in sizes
        for rank, steps in enumerate(run(_recorded, train, args, world_size=size, timeout=timeout))
    ]
    (first, reference), *others = ranks
    if not reference:
        raise ValueError("`train` must yield after each step, but yielded nothing: let it do one")
    nothing: dict[str, Any] = {}
    for rank, steps in others:
        for step, both in enumerate(zip_longest(steps, reference, fillvalue=nothing), start=1):
            try:
                assert_close(*both, rtol=rtol, atol=atol, equal_nan=True)
            except AssertionError as error:
                raise AssertionError(
                    f"training must be the same at every world size, but {rank} differs from "
                    f"{first} after step {step}: {error}"
                ) from None


def _recorded(train: Any, args: Any) -> list[dict[str, Any]]:
    """Return the tensors that `train` yields on this rank after each step."""
    return [_copied(trained) for trained in train(*args)]


def _copied(trained: Any) -> dict[str, Any]:
    """Return copies of the yielded tensors, because the next step changes them."""
    named = dict(named_tensors(trained)) if isinstance(trained, nn.Module) else trained
    full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in named.items()}
    return {k: v.detach().cpu().clone() if isinstance(v, Tensor) else v for k, v in full.items()}

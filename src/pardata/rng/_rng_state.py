"""The default generators of Python, NumPy and PyTorch: seeded, put back, caught in use."""

import json
import pickle
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import torch

from pardata.rng._seeds import run_seed


class DefaultGenerator(NamedTuple):
    """One default generator of this process: how it is seeded, its state seen and set."""

    seed: Callable[[int], object]
    state: Callable[[], Any]
    restore: Callable[[Any], object]

    def advanced_since(self, state: Any) -> bool:
        now = self.state()
        return not (torch.equal(now, state) if isinstance(state, torch.Tensor) else now == state)


def _of_numpy(random_: Any) -> DefaultGenerator:
    """Return NumPy's, whose state is taken as bytes: arrays in a dict cannot be compared."""

    def state() -> bytes:
        return pickle.dumps(random_.get_state(legacy=False))

    def restore(state: bytes) -> None:
        random_.set_state(pickle.loads(state))  # noqa: S301  # it was dumped here

    return DefaultGenerator(lambda number: random_.seed(number % 2**32), state, restore)


@cache
def default_generators() -> tuple[DefaultGenerator, ...]:
    """Return those of this process: Python's, NumPy's where it is installed, PyTorch's."""
    found = [DefaultGenerator(random.seed, random.getstate, random.setstate)]
    if (numpy := numpy_or_none()) is not None:
        found.append(_of_numpy(numpy.random))
    return (*found, _of_torch(torch.default_generator))


def seed_generators(number: int, among: Iterable[DefaultGenerator] | None = None) -> None:
    """Seed generators: the default ones of this process but those of GPUs, or others."""
    for generator in default_generators() if among is None else among:
        generator.seed(number)


class ForkedRng:
    """Puts generators back, after a block, to where they are now; seeds them for it, if told to.

    A context manager of contextlib takes twice as long, and `backward` needs one a microbatch.
    """

    def __init__(self, generators: Iterable[DefaultGenerator], seed: int | None = None) -> None:
        self.states, self._seed = [(each, each.state()) for each in generators], seed

    def __enter__(self) -> None:
        if self._seed is not None:
            for generator, _ in self.states:
                generator.seed(self._seed)

    def __exit__(self, *_: object) -> None:
        for generator, state in self.states:
            generator.restore(state)

    def advanced(self) -> bool:
        """Return whether somebody drew from one, or seeded it."""
        return any(generator.advanced_since(state) for generator, state in self.states)


def fork_rng(seed: int | None = None, device: torch.device | None = None) -> ForkedRng:
    """Restore the default generators after a block, which begins with `seed` if one is given."""
    return ForkedRng((*default_generators(), *_of(device)), seed)


def fork_torch_rng(number: int) -> ForkedRng:
    """Seed PyTorch's default generators for a block, and put them back after it.

    These are the CPU's, and those of accelerators in use. Their states are on the host, so no GPU
    waits.
    """
    return ForkedRng((default_generators()[-1], *_of_kind(torch.get_device_module())), number)


def get_rng_state(device: torch.device) -> bytes:
    """Return where the random numbers of this process are, those of a GPU `device` included.

    For `set_rng_state` of any process to come.
    """
    of_torch = default_generators()[-1], *_of(device)
    saved = {
        "noise": [run_seed.seed, run_seed.calls],
        "Python": random.getstate(),
        "PyTorch": [generator.state().tolist() for generator in of_torch],
    }
    if (numpy := numpy_or_none()) is not None:
        saved["NumPy"] = numpy.random.get_state(legacy=False)
    return zlib.compress(json.dumps(saved, default=lambda array: array.tolist()).encode())


def set_rng_state(states: Iterable[int], device: torch.device, *, only_seed: bool) -> None:
    """Put the random numbers to where `get_rng_state` found them, or only what all ranks share.

    Raises:
        RuntimeError: for what it did not return.
    """
    try:
        saved = json.loads(zlib.decompress(bytes(states)))
        run_seed.seed, run_seed.calls = saved["noise"]
        if only_seed:
            return
        version, words, normal = saved["Python"]
        random.setstate((version, tuple(words), normal))
        if "NumPy" in saved and (numpy := numpy_or_none()) is not None:
            numpy.random.set_state(saved["NumPy"])
        of_torch = default_generators()[-1], *_of(device)
        # A GPU may be here or not.
        for generator, state in zip(of_torch, saved["PyTorch"], strict=False):
            generator.restore(torch.tensor(state, dtype=torch.uint8, device="cpu"))
    except (zlib.error, LookupError, ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        raise RuntimeError(
            f"cannot restore the random generators, as their saved state is invalid: {error!r}"
        ) from error


@contextmanager
def forbid_rng_use(what: str, device: torch.device | None = None) -> Iterator[None]:
    """Raise, after the block, if it drew from a default generator.

    Raises:
        RuntimeError: says that `what` drew, and how to let it.
    """
    before = fork_rng(device=device)
    yield
    if before.advanced():
        raise RuntimeError(
            f"`{what}` must draw no random numbers from a batch whose size depends on the number "
            f"of ranks, but did: pass `microbatch_size`, so that it gets the same microbatches "
            f"at every world size, or reproducible=False"
        )


@cache
def numpy_or_none() -> Any:
    """Return NumPy if it is installed: pardata does not require it."""
    with suppress(ImportError):
        import numpy as np  # noqa: PLC0415  # it may be missing

        return np
    return None


def _of(device: torch.device | None) -> tuple[DefaultGenerator, ...]:
    """Return the default generator of a GPU, or of another accelerator."""
    if device is None or device.type in ("cpu", "meta"):
        return ()
    of_kind = torch.get_device_module(device)
    if not hasattr(of_kind, "default_generators"):
        return _of_kind(of_kind)
    of_kind.init()
    index = of_kind.current_device() if device.index is None else device.index
    return (_of_torch(of_kind.default_generators[index]),)


def _of_kind(kind: Any) -> tuple[DefaultGenerator, ...]:
    """Return the default generators of all devices of a kind that are in use."""
    if hasattr(kind, "get_rng_state") and not hasattr(kind, "default_generators"):
        # a kind that is one device
        return (DefaultGenerator(kind.manual_seed, kind.get_rng_state, kind.set_rng_state),)
    return tuple(map(_of_torch, getattr(kind, "default_generators", ())))


def _of_torch(generator: torch.Generator) -> DefaultGenerator:
    # Not torch.manual_seed, which seeds every device and takes a hundred times as long.
    return DefaultGenerator(generator.manual_seed, generator.get_state, generator.set_state)

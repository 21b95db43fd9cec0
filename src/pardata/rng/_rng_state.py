"""The default generators of Python, NumPy and PyTorch: seed, save, restore, detect use.

Does not see generators that the user has made.
"""

import json
import os
import pickle
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import torch

from pardata._validation import check_bool, check_int
from pardata.environment._world import is_single_process, require_world, world
from pardata.rng._seeds import loader_counts, mix, noise_seed, run_seed


class DefaultGenerator(NamedTuple):
    """A default generator of this process, as functions that seed it, get and set its state."""

    seed: Callable[[int], object]
    state: Callable[[], Any]
    restore: Callable[[Any], object]

    def advanced_since(self, state: Any) -> bool:
        now = self.state()
        return not (torch.equal(now, state) if isinstance(state, torch.Tensor) else now == state)


def _of_numpy(random_: Any) -> DefaultGenerator:
    """Return NumPy's default generator, with a state of bytes, which compare as a whole."""

    def state() -> bytes:
        return pickle.dumps(random_.get_state(legacy=False))

    def restore(state: bytes) -> None:
        random_.set_state(pickle.loads(state))  # noqa: S301  # dumped by `state`

    return DefaultGenerator(lambda number: random_.seed(number % 2**32), state, restore)


@cache
def default_generators() -> tuple[DefaultGenerator, ...]:
    """Return the default generators of Python, NumPy, if it is installed, and PyTorch's CPU."""
    found = [DefaultGenerator(random.seed, random.getstate, random.setstate)]
    if (numpy := numpy_or_none()) is not None:
        found.append(_of_numpy(numpy.random))
    return (*found, _of_torch(torch.default_generator))


def seed_generators(number: int, among: Iterable[DefaultGenerator] | None = None) -> None:
    """Seed the default generators of this process except those of GPUs, or the given ones."""
    for generator in default_generators() if among is None else among:
        generator.seed(number)


def seed_everything(seed: int, *, per_rank: bool = False, deterministic: bool = False) -> int:
    """Seed Python's, NumPy's (if installed) and PyTorch's generators, on all devices.

    Call it once, before the model is built. It returns the seed that was used. Not collective.
    `backward` derives the seed of each microbatch from this seed, so dropout differs between them.
    The loader derives its order and the seeds of its workers from its `seed`, by default from this
    seed.

    Args:
        seed: 0 to 2**63 - 1. Equal on all ranks, so that they build equal models.
        per_rank: mix the rank in, for what you draw yourself and must differ between ranks. In a
            loop that runs ``loss.backward()`` that is dropout too. In a single process the rank is
            0.
        deterministic: also ask PyTorch for deterministic algorithms (an operation that has none
            then raises), but not to fill uninitialized memory, and switch cuDNN's autotuning off.
            Slower on a GPU.

    Raises:
        TypeError, ValueError: the seed is no integer or out of range, or a flag is no bool.

    >>> seed_everything(0)
    0
    """
    seed = check_int("seed", seed)
    if not 0 <= seed < 2**63:
        raise ValueError(f"`seed` must be between 0 and 2**63 - 1, but is {seed}")
    check_bool("per_rank", per_rank)
    check_bool("deterministic", deterministic)
    loader_counts.clear()
    run_seed.seed, run_seed.calls = seed, 0  # without the rank, which `backward` mixes in
    if per_rank:
        seed = mix(seed, require_world("seed_everything(per_rank=True)", is_collective=False).rank)
    seed_generators(seed)
    torch.manual_seed(seed)  # seeds every device
    if deterministic:
        # cuBLAS reads it when it starts; see torch.use_deterministic_algorithms.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # PyTorch would otherwise fill each uninitialized tensor, with one kernel for each.
        deterministic_settings: Any = torch.utils.deterministic
        deterministic_settings.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False
    return seed


def next_batch_seed() -> int:
    """Return the seed of a batch that is no `Microbatches`: it differs between ranks and calls."""
    run_seed.calls += 1
    seed = torch.default_generator.initial_seed() if run_seed.seed is None else run_seed.seed
    rank = 0 if is_single_process() else world().rank
    return noise_seed(seed, rank) + run_seed.calls


class ForkedRng:
    """Context manager: saves the generators' states, seeds them if asked, restores them at exit.

    A class, because contextlib takes twice as long, and `backward` enters one for each microbatch.
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
        """Return whether the state of a generator has changed."""
        return any(generator.advanced_since(state) for generator, state in self.states)


def fork_rng(seed: int | None = None, device: torch.device | None = None) -> ForkedRng:
    """Restore the default generators after a block, which begins with `seed` if one is given."""
    return ForkedRng((*default_generators(), *_of(device)), seed)


def fork_torch_rng(number: int) -> ForkedRng:
    """Seed PyTorch's default generators for a block, and restore them after it.

    These are the generators of the CPU and of all visible accelerators. Their states are on the
    host, so no GPU waits.
    """
    return ForkedRng((default_generators()[-1], *_of_kind(torch.get_device_module())), number)


def get_rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the default generators, including the one of a GPU `device`."""
    of_torch = default_generators()[-1], *_of(device)
    saved = {
        "noise": [run_seed.seed, run_seed.calls],
        "Python": random.getstate(),
        "PyTorch": [generator.state() for generator in of_torch],
    }
    if (numpy := numpy_or_none()) is not None:
        saved["NumPy"] = numpy.random.get_state(legacy=False)
    return saved


def serialize_rng_state(states: dict[str, Any]) -> bytes:
    """Return states as bytes, which another process can pass to `set_rng_state`. Takes 2 ms."""
    return zlib.compress(json.dumps(states, default=lambda array: array.tolist()).encode())


def set_rng_state(states: Iterable[int], device: torch.device, *, only_seed: bool) -> None:
    """Restore the run's seed and, unless `only_seed`, the generators from `serialize_rng_state`.

    Raises:
        RuntimeError: `serialize_rng_state` did not return these states.
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
        # This process need not have a GPU.
        for generator, state in zip(of_torch, saved["PyTorch"], strict=False):
            generator.restore(torch.tensor(state, dtype=torch.uint8, device="cpu"))
    except (zlib.error, LookupError, ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        msg = f"cannot restore the random generators, as their saved state is invalid: {error!r}"
        raise RuntimeError(msg) from error


@contextmanager
def forbid_rng_use(what: str, device: torch.device | None = None) -> Iterator[None]:
    """Raise after the block if a default generator was used in it.

    Raises:
        RuntimeError: `what` drew random numbers; the error says how to allow it.
    """
    before = fork_rng(device=device)
    yield
    if before.advanced():
        msg = f"`{what}` must draw no random numbers: pass `microbatch_size`, or reproducible=False"
        raise RuntimeError(msg)


@cache
def numpy_or_none() -> Any:
    """Return NumPy if it is installed, which pardata does not require."""
    with suppress(ImportError):
        import numpy as np  # noqa: PLC0415  # optional

        return np
    return None


def _of(device: torch.device | None) -> tuple[DefaultGenerator, ...]:
    """Return the default generator of an accelerator in a tuple, which is empty for a CPU."""
    if device is None or device.type in ("cpu", "meta"):
        return ()
    of_kind = torch.get_device_module(device)
    if not hasattr(of_kind, "default_generators"):
        return _of_kind(of_kind)
    of_kind.init()
    index = of_kind.current_device() if device.index is None else device.index
    return (_of_torch(of_kind.default_generators[index]),)


def _of_kind(kind: Any) -> tuple[DefaultGenerator, ...]:
    """Return the default generators of all visible devices of this type."""
    if hasattr(kind, "get_rng_state") and not hasattr(kind, "default_generators"):
        # A device type that has a single device.
        return (DefaultGenerator(kind.manual_seed, kind.get_rng_state, kind.set_rng_state),)
    return tuple(map(_of_torch, getattr(kind, "default_generators", ())))


def _of_torch(generator: torch.Generator) -> DefaultGenerator:
    # torch.manual_seed seeds every device, and takes a hundred times as long.
    return DefaultGenerator(generator.manual_seed, generator.get_state, generator.set_state)

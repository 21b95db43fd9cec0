"""The default generators of Python, NumPy and PyTorch: seeded, put back, caught in use."""

import ctypes
import json
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import torch

from pardata.seeds._run_seed import run_seed


class Default(NamedTuple):
    """One default generator of this process: how it is seeded, its state seen and set."""

    seed: Callable[[int], object]
    state: Callable[[], Any]
    restore: Callable[[Any], object]

    def moved_since(self, state: Any) -> bool:
        """Return whether somebody drew from it, or seeded it."""
        now = self.state()
        return not (torch.equal(now, state) if isinstance(now, torch.Tensor) else now == state)


class _NumPyState(NamedTuple):
    """NumPy's state, and its words as they lie in memory, if nothing else belongs to it."""

    whole: tuple[Any, ...]
    words: bytes
    address: int


class _NumPy:
    """NumPy's, which takes 35 microseconds to hand out its state, and 40 to take one.

    So where the words in memory are seen to be those that it hands out, they are read and written
    there. (To exchange its bit generator takes less than one, but forgets the second of two normal
    numbers, of which only the whole state tells.)
    """

    def __init__(self, numpy: Any) -> None:
        self._numpy = numpy
        self._last: _NumPyState | None = None

    def seed(self, number: int) -> None:
        self._numpy.random.seed(number % 2**32)

    def state(self) -> _NumPyState:
        if self._last is not None and self._is_in_memory(self._last):
            return self._with_second_normal(self._last)
        kind, words, position, has_normal, normal = self._numpy.random.get_state()
        whole = kind, words.tobytes(), position, has_normal, normal
        raw = whole[1] + position.to_bytes(4, sys.byteorder)
        found = _NumPyState(whole, raw, self._address() if kind == "MT19937" else 0)
        is_plain = not has_normal and self._is_in_memory(found)
        self._last = found if is_plain else found._replace(words=b"")
        return self._last

    def _with_second_normal(self, last: _NumPyState) -> _NumPyState:
        """Return the state of these words: the last one, or one that holds a second normal number.

        No word tells of it, but a draw does, which takes it and no word.
        """
        normal = self._numpy.random.standard_normal()
        is_held = self._is_in_memory(last)
        found = last._replace(whole=(*last.whole[:3], 1, normal), words=b"") if is_held else last
        self.restore(found)
        return found

    def restore(self, state: _NumPyState) -> None:
        self._last = state
        if state.words and self._address() == state.address:
            self._numpy.random.seed(0)  # forgets the second of two normal numbers
            with self._numpy.random.get_bit_generator().lock:
                ctypes.memmove(state.address, state.words, len(state.words))
        else:
            kind, words, *rest = state.whole
            words = self._numpy.frombuffer(words, self._numpy.uint32)
            self._numpy.random.set_state((kind, words, *rest))

    def _is_in_memory(self, state: _NumPyState) -> bool:
        known = state.words and 0 != self._address() == state.address
        return bool(known and ctypes.string_at(state.address, len(state.words)) == state.words)

    def _address(self) -> int:
        if not hasattr(self._numpy.random, "get_bit_generator"):  # NumPy before 1.24
            return 0
        return int(self._numpy.random.get_bit_generator().ctypes.state_address)


@cache
def default_generators() -> tuple[Default, ...]:
    """Return those of this process: Python's, NumPy's where it is installed, PyTorch's."""
    found = [Default(random.seed, random.getstate, random.setstate)]
    if (numpy := numpy_or_none()) is not None:
        numpys = _NumPy(numpy)
        found.append(Default(numpys.seed, numpys.state, numpys.restore))
    return (*found, _of_torch(torch.default_generator))


def seed_generators(number: int, among: Iterable[Default] | None = None) -> None:
    """Seed generators: the default ones of this process but those of GPUs, or others."""
    for generator in default_generators() if among is None else among:
        generator.seed(number)


def states_of(generators: Iterable[Default]) -> list[tuple[Default, Any]]:
    """Return the state of each, for `moved`."""
    return [(own, own.state()) for own in generators]


def moved(states: list[tuple[Default, Any]]) -> list[Default]:
    """Return those that somebody drew from, or seeded, since."""
    return [own for own, state in states if own.moved_since(state)]


class Kept:
    """Puts generators back, after a block, to where they are now; seeds them for it, if told to.

    No context manager of contextlib, which takes as long again: `backward` needs one a microbatch.
    """

    def __init__(self, generators: Iterable[Default], seed: int | None = None) -> None:
        self.states, self._seed = states_of(generators), seed

    def __enter__(self) -> None:
        if self._seed is not None:
            for own, _ in self.states:
                own.seed(self._seed)

    def __exit__(self, *_: object) -> None:
        for own, state in self.states:
            own.restore(state)


def kept_generators() -> Kept:
    """Put the default generators back, after a block, to where they were."""
    return Kept(default_generators())


def forked_seed(number: int, device: torch.device | None = None) -> Kept:
    """Seed the default generators for a block, and put them back after it."""
    return Kept((*default_generators(), *_of(device)), number)


def forked_noise(number: int) -> Kept:
    """Seed what a model draws from for a block, and put it back: PyTorch's default generators.

    That of the CPU, and those of accelerators in use, which are numbers on the host: no GPU waits.
    """
    return Kept((default_generators()[-1], *_of_kind(torch.get_device_module())), number)


def generator_states(device: torch.device) -> bytes:
    """Return where the random numbers of this process are, those of a GPU `device` included.

    For `restore_generators` of any process to come.
    """
    of_torch = default_generators()[-1], *_of(device)
    saved = {
        "noise": [run_seed.seed, run_seed.calls],
        "Python": random.getstate(),
        "PyTorch": [own.state().tolist() for own in of_torch],
    }
    if (numpy := numpy_or_none()) is not None:
        kind, words, *rest = numpy.random.get_state()
        saved["NumPy"] = [kind, words.tolist(), *rest]
    return zlib.compress(json.dumps(saved).encode())


def restore_generators(states: Iterable[int], device: torch.device, *, only_seed: bool) -> None:
    """Put the random numbers to where `generator_states` found them, or only what all ranks share.

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
            numpy.random.set_state(tuple(saved["NumPy"]))
        of_torch = default_generators()[-1], *_of(device)
        for own, state in zip(of_torch, saved["PyTorch"], strict=False):  # a GPU may be here or not
            own.restore(torch.tensor(state, dtype=torch.uint8, device="cpu"))
    except (zlib.error, LookupError, ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        raise RuntimeError(
            f"cannot restore the random generators: the saved state is invalid "
            f"({type(error).__name__}: {error})"
        ) from error


@contextmanager
def no_draws(what: str, device: torch.device | None = None, *, thorough: bool) -> Iterator[None]:
    """Raise, after the block, where it drew from a default generator.

    PyTorch's are always looked at; the others, which takes longer, if `thorough`.

    Raises:
        RuntimeError: says that `what` drew, and how to let it.
    """
    *others, default = default_generators()
    states = states_of((*(others if thorough else ()), default, *_of(device)))
    yield
    if moved(states):
        raise RuntimeError(
            f"`{what}` must draw no random numbers from a batch whose size depends on the number "
            f"of ranks, but did: pass `microbatch_size`, so that it gets the same "
            f"microbatches at every world size, each seeded alike, or reproducible=False"
        )


@cache
def numpy_or_none() -> Any:
    """Return NumPy if it is installed: pardata does not require it."""
    with suppress(ImportError):
        import numpy as np  # noqa: PLC0415

        return np
    return None


def _of(device: torch.device | None) -> tuple[Default, ...]:
    """Return the default generator of a GPU, or of another accelerator."""
    if device is None or device.type in ("cpu", "meta"):
        return ()
    of_kind = torch.get_device_module(device)
    if not hasattr(of_kind, "default_generators"):
        return _of_kind(of_kind)
    of_kind.init()
    index = of_kind.current_device() if device.index is None else device.index
    return (_of_torch(of_kind.default_generators[index]),)


def _of_kind(of_kind: Any) -> tuple[Default, ...]:
    """Return the default generators of all devices of a kind that are in use."""
    if hasattr(of_kind, "get_rng_state") and not hasattr(of_kind, "default_generators"):
        # a kind that is one device
        return (Default(of_kind.manual_seed, of_kind.get_rng_state, of_kind.set_rng_state),)
    return tuple(map(_of_torch, getattr(of_kind, "default_generators", ())))


def _of_torch(generator: torch.Generator) -> Default:
    # Not torch.manual_seed, which seeds every device and takes a hundred times as long.
    return Default(generator.manual_seed, generator.get_state, generator.set_state)

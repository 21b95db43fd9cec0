"""The default generators of Python, NumPy and PyTorch: seeded, put back, caught in use."""

import ctypes
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

_NUMPY_WORDS = 624  # of the Mersenne Twister


class Default(Protocol):
    """One default generator of this process."""

    def seed(self, number: int) -> None: ...
    def state(self) -> Any: ...
    def restore(self, state: Any) -> None: ...
    def moved_since(self, state: Any) -> bool: ...


class _Python:
    def seed(self, number: int) -> None:
        random.seed(number)

    def state(self) -> Any:
        return random.getstate()

    def restore(self, state: Any) -> None:
        random.setstate(state)

    def moved_since(self, state: Any) -> bool:
        return bool(random.getstate() != state)


class _NumPyState(NamedTuple):
    """NumPy's state, and its words as they lie in memory, if nothing else belongs to it."""

    whole: tuple[Any, ...]
    words: bytes
    address: int


class _NumPy:
    """NumPy's, which takes 35 microseconds to hand out its state, and 40 to take one.

    So where the words in memory are seen to be those that it hands out, they are read and written
    there.
    """

    def __init__(self, numpy: Any) -> None:
        self._random = numpy.random
        self._last: _NumPyState | None = None

    def seed(self, number: int) -> None:
        self._random.seed(number % 2**32)

    def state(self) -> _NumPyState:
        if self._last is None or not self._has_words_of(self._last):
            self._last = self._read()
        return self._last

    def restore(self, state: _NumPyState) -> None:
        if not state.words or self._address() != state.address:
            self._random.set_state(state.whole)
            return
        self._random.seed(0)  # forgets the second of two normal numbers, which is not in the words
        with self._random.get_bit_generator().lock:
            ctypes.memmove(state.address, state.words, len(state.words))

    def moved_since(self, state: _NumPyState) -> bool:
        if state.words and self._address() == state.address:
            return not self._has_words_of(state)
        _, words, *rest = self._random.get_state()
        return bool(rest != list(state.whole[2:]) or words.tobytes() != state.whole[1].tobytes())

    def _read(self) -> _NumPyState:
        whole = self._random.get_state()
        kind, words, position, has_normal, _ = whole
        raw = words.tobytes() + position.to_bytes(4, sys.byteorder)
        address = self._address()
        plain = kind == "MT19937" and not has_normal and address != 0
        if not plain or ctypes.string_at(address, len(raw)) != raw:
            raw = b""
        return _NumPyState(whole, raw, address)

    def _has_words_of(self, state: _NumPyState) -> bool:
        size = len(state.words)
        return (
            size > 0
            and self._address() == state.address
            and ctypes.string_at(state.address, size) == state.words
        )

    def _address(self) -> int:
        if not hasattr(self._random, "get_bit_generator"):  # NumPy before 1.24
            return 0
        address: int = self._random.get_bit_generator().ctypes.state_address
        return address


class _Torch:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def seed(self, number: int) -> None:
        # Not torch.manual_seed, which seeds every device and takes a hundred times as long.
        self._generator.manual_seed(number)

    def state(self) -> Any:
        return self._generator.get_state()

    def restore(self, state: Any) -> None:
        self._generator.set_state(state)

    def moved_since(self, state: Any) -> bool:
        return not torch.equal(self._generator.get_state(), state)


@cache
def default_generators() -> tuple[Default, ...]:
    """Return those of this process: Python's, NumPy's where it is installed, PyTorch's."""
    numpy = numpy_or_none()
    python: list[Default] = [_Python()] if numpy is None else [_Python(), _NumPy(numpy)]
    return (*python, _Torch(torch.default_generator))


def seed_generators(
    number: int, device: torch.device | None = None, among: Iterable[Default] | None = None
) -> None:
    """Seed the default generators of this process (`among` them), and that of a GPU `device`."""
    for generator in (*(default_generators() if among is None else among), *_of(device)):
        generator.seed(number)


@contextmanager
def kept_generators(device: torch.device | None = None) -> Iterator[None]:
    """Put the default generators back, after the block, to where they were."""
    states = [(own, own.state()) for own in (*default_generators(), *_of(device))]
    try:
        yield
    finally:
        for own, state in states:
            own.restore(state)


@contextmanager
def forked_seed(number: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the default generators for a block, and put them back after it."""
    with kept_generators(device):
        seed_generators(number, device)
        yield


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return where the default generators of this process are, that of a GPU `device` included.

    Of integers, strings and lists alone, for `restore_generators` of any process to come.
    """
    version, words, normal = random.getstate()
    found: dict[str, Any] = {"python": [version, list(words), normal]}
    if (numpy := numpy_or_none()) is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = [kind, keys.tolist(), *rest]
    found["torch"] = _hex(torch.get_rng_state())
    if device.type == "cuda":
        found["cuda"] = _hex(torch.cuda.get_rng_state(device))
    return found


def restore_generators(states: dict[str, Any], device: torch.device) -> None:
    """Put the default generators to where `generator_states` found them.

    Raises:
        RuntimeError: for what it did not return.
    """
    try:
        version, words, normal = states["python"]
        random.setstate((version, tuple(words), normal))
        if "numpy" in states and (numpy := numpy_or_none()) is not None:
            kind, keys, position, *normal = states["numpy"]
            # NumPy would read beyond its words.
            if not 0 <= position <= _NUMPY_WORDS:
                msg = f"NumPy's is at {position} of {_NUMPY_WORDS}"
                raise ValueError(msg)
            numpy.random.set_state((kind, keys, position, *normal))
        torch.set_rng_state(_from_hex(states["torch"]))
        if "cuda" in states and device.type == "cuda":
            torch.cuda.set_rng_state(_from_hex(states["cuda"]), device)
    except (TypeError, ValueError, LookupError, RuntimeError, OverflowError) as error:
        msg = (
            f"the default generators must be put back to where they once were, but what was saved "
            f"of them is nothing of theirs ({type(error).__name__}: {error})"
        )
        raise RuntimeError(msg) from error


@contextmanager
def no_draws(what: str, device: torch.device | None = None, *, thorough: bool) -> Iterator[None]:
    """Raise, after the block, where it drew from a default generator.

    PyTorch's are always looked at; the others, which takes longer, if `thorough`.

    Raises:
        RuntimeError: says that `what` drew, and how to let it.
    """
    *others, default = default_generators()
    states = [(own, own.state()) for own in (*(others if thorough else ()), default, *_of(device))]
    yield
    if any(own.moved_since(state) for own, state in states):
        msg = (
            f"`{what}` must draw no random numbers from a batch whose size depends on the number "
            f"of ranks, but did: pass `microbatch_size`, so that it gets the same pieces at every "
            f"world size, each seeded alike, or reproducible=False"
        )
        raise RuntimeError(msg)


@cache
def numpy_or_none() -> Any:
    """Return NumPy if it is installed: pardata does not require it."""
    try:
        import numpy as np  # noqa: PLC0415
    except ImportError:
        return None
    return np


def _hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def _of(device: torch.device | None) -> tuple[Default, ...]:
    """Return the default generator of a GPU."""
    if device is None or device.type != "cuda":
        return ()
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return (_Torch(torch.cuda.default_generators[index]),)

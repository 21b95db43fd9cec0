"""An all-reduce that first compares what the ranks pass, by a fingerprint of its structure.

gloo left to itself returns wrong numbers, or ends the process, if sizes differ between ranks; other
backends hang or continue. So the first collective always has one fixed size, and carries hashes of
the structure together with the first numbers. Only if all ranks agree, they send more.
"""

import functools
import hashlib
import reprlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pardata._pytree import KeyPath, keystr, leaves_with_path, map_with_path
from pardata.collectives._comm_errors import explain_comm_errors
from pardata.environment._device import has_accelerator_backend, widest_float_dtype
from pardata.environment._world import cpu_group_and_device, require_world, store_client
from pardata.store._current_op import check_allowed
from pardata.store._round import exchange, raise_if_different

_T = TypeVar("_T")

# Slots of the header, of float64: hashes, their squares (or negatives), numbers.
_HEADER = 64
_HASHES = 3
_FIRST = 2 * _HASHES
PAYLOAD_SLOTS = _HEADER - _FIRST
_MAX = dist.ReduceOp.MAX

# A dense tensor or a real number (a bool and a NumPy scalar are numbers).
Leaf: TypeAlias = Tensor | float

# Waits for the least and the most of each number of a collective.
LeastAndMost: TypeAlias = Callable[[], list[tuple[int, int]]]

# What is summed: single numbers in a list, which takes less time, anything else in a vector.
Values: TypeAlias = list[float] | Tensor


class CheckedCollective:
    """The leaves of this rank's value, and an all-reduce that compares them with the others'.

    Attributes:
        here: this rank.
        device: where the header is reduced: on the CPU wherever the world reduces there, so that
            nobody who reads it waits for a GPU.
        exact: whether whole numbers stay whole.
        leaves: what the value is made of.
        wire_dtypes: of each leaf the dtype in which the accelerator's backend reduces it; None for
            one that is reduced on the CPU.
    """

    def __init__(
        self,
        call: str,
        find: Callable[[], dict[KeyPath, Any]],
        describe: Callable[[Any], str],
        *,
        exact: bool = False,
    ) -> None:
        check_allowed(call)
        self.here, self._call, self.exact = require_world(call), call, exact
        # Chosen from the world and never from the values: ranks could be of two minds.
        self._group, self.device = cpu_group_and_device(self.here)
        self._error: Exception | None = None
        found = self.capture(find, {})
        self._paths, self.leaves = list(found), list(found.values())
        self._kinds = self.capture(lambda: [describe(leaf) for leaf in self.leaves], [])
        apart = self.here.size == 1 or has_accelerator_backend(self.here.backend)
        self.wire_dtypes = [self._wire_dtype(leaf) if apart else None for leaf in self.leaves]

    def capture(self, work: Callable[[], Any], otherwise: Any) -> Any:
        """Return what `work` returns; if it fails, `all_reduce` raises that, on every rank."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks are waiting
            self._error = self._error or error
            return otherwise

    def all_reduce(self, pack: Callable[[], list[float]]) -> list[float]:
        """Return the sums of what `pack` returns, at most `PAYLOAD_SLOTS` numbers, over all ranks.

        Where a leaf is on a GPU on some ranks only, nothing travels apart: `pack` is called again.

        Raises:
            RuntimeError: on every rank, if one refused its value or the structures differ; the
                rank that refused raises its own error.
        """
        numbers: list[float] = self.capture(pack, [])
        if self.here.size == 1:
            if self._error is not None:
                raise self._error
            return numbers
        before = self.wire_dtypes
        sums = self.start(numbers, later=False)()  # takes 10 microseconds less
        return sums if before is self.wire_dtypes else self.all_reduce(pack)

    def start(self, numbers: list[float], *, later: bool = True) -> Callable[[], list[float]]:
        """Begin to sum a few numbers over all ranks, and return what waits for the sums.

        That raises as `all_reduce` does. It must be called once, on every rank.
        """
        wait = self._reduced([*self._fingerprint(), *numbers], dist.ReduceOp.SUM, later=later)

        def sums() -> list[float]:
            back = wait()
            if not fingerprints_match(back[:_FIRST]):
                self._raise_mismatch()
                self.wire_dtypes = [None] * len(self.leaves)  # they differ in these alone
            return back[_FIRST : _FIRST + len(numbers)]

        return sums

    def start_min_max(self, numbers: Sequence[int]) -> LeastAndMost:
        """Begin to compare integers below 2**53; return what waits for the least and the most."""
        signed = [*self._fingerprint()[:_HASHES], *numbers]
        # The least of a number is the most of its negative.
        both = [sign * number for number in signed for sign in (1, -1)]
        wait = self._reduced(both, _MAX, later=True)

        def least_and_most() -> list[tuple[int, int]]:
            with explain_comm_errors(self._call):
                back = wait()
            pairs = [
                (-int(least), int(most)) for most, least in zip(back[::2], back[1::2], strict=True)
            ]
            if any(least != most for least, most in pairs[:_HASHES]):
                self._raise_mismatch()
            return pairs[_HASHES : len(signed)]

        return least_and_most

    def _fingerprint(self) -> list[int]:
        # A rank that refused takes part all the same, with a structure that nobody shares.
        refused = None if self._error is None else self.here.rank
        text = f"{self._call} {self._paths} {self._kinds} {self.wire_dtypes} {refused}"
        return fingerprint_slots(text, self.here.size)

    def _reduced(
        self, numbers: Sequence[float], op: Any, *, later: bool
    ) -> Callable[[], list[float]]:
        """Begin the all-reduce, always of as many numbers; return what waits for them."""
        sent = array("d", [*numbers, *[0.0] * (_HEADER - len(numbers))])
        header = torch.frombuffer(sent, dtype=torch.float64).to(self.device)  # faster than tensor
        work: Any = None
        if self.here.size > 1:
            work = dist.all_reduce(header, op, group=self._group, async_op=later)

        def reduced() -> list[float]:
            if work is not None:
                work.wait()
            back: list[float] = header.tolist()
            return back

        return reduced

    def _raise_mismatch(self) -> None:
        """Raise on every rank, with a table of the calls or of the structures in which they are."""
        cure = "Make the same call with the same structure on every rank."
        differ = functools.partial(raise_if_different, self._call, cure=cure)
        exchange(store_client(), self._call, lambda: {"structure": self._facts()}, differ)

    def group(self, tensor: Tensor) -> Any:
        """Return the process group that takes `tensor`, once all ranks are known to agree."""
        return self._group if tensor.device == self.device else None

    def leaves_with(self, way: torch.dtype | None) -> list[Leaf]:
        """Return the leaves that travel in this way."""
        return [leaf for leaf, one in zip(self.leaves, self.wire_dtypes, strict=True) if one is way]

    def vector(self, numbers: list[float]) -> Tensor:
        """Return numbers as they travel."""
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)

    def rebuilt(self, value: _T, replacements: Iterable[Any], is_leaf: Any = None) -> _T:
        """Return a value like this rank's, of other leaves."""
        found = dict(zip(self._paths, replacements, strict=True))
        like: _T = map_with_path(value, lambda path, _: found[path], is_leaf=is_leaf)
        return like

    def _wire_dtype(self, leaf: Any) -> torch.dtype | None:
        if (
            not isinstance(leaf, Tensor)
            or leaf.is_cpu
            or widest_float_dtype(leaf.device) != torch.float64
        ):
            return None
        return torch.int64 if self.exact and not leaf.is_floating_point() else torch.float64

    def _facts(self) -> str:
        if self._error is not None:
            raise self._error
        both = zip(self._paths, self._kinds, strict=True)
        return "; ".join(f"{keystr('value', path)}: {kind}" for path, kind in both)


def numbers_of(value: object) -> dict[KeyPath, Any]:
    """Return the leaves of `value` by their paths, in the same order on every rank.

    Raises:
        TypeError: for a leaf that is no number, naming its path, as ``value['loss'][2]``.
    """
    return {path: number_of(leaf, path) for path, leaf in leaves_with_path(value, by_text=True)}


def number_of(leaf: Any, path: KeyPath, name: str = "value") -> Leaf:
    """Return a leaf that is a number; see `numbers_of`."""
    # By exact type first: metrics are reduced often, and an abstract class takes a microsecond.
    if type(leaf) is float or type(leaf) is int:
        return leaf
    if isinstance(leaf, Tensor):
        must, but = "a dense tensor of real numbers", "complex: convert it first"
        if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.layout != torch.strided:
            but = f"a {leaf.layout} {type(leaf).__name__}: convert it first"
        elif not leaf.is_complex():
            return leaf
    else:
        if getattr(leaf, "ndim", None) == 0 and hasattr(leaf, "item"):
            leaf = leaf.item()  # a scalar of NumPy's, whose bool is no Real
        if isinstance(leaf, Real):
            return leaf  # type: ignore[return-value]  # Real is what numbers have in common
        must, but = "a number or a tensor", f"{reprlib.repr(leaf)} ({type(leaf).__name__})"
    raise TypeError(f"`{keystr(name, path)}` must be {must}, but is {but}")


@functools.lru_cache(maxsize=64)  # a training loop reduces the same few structures
def fingerprint_slots(text: str, size: int) -> list[int]:
    """Return hashes of `text`, and `size` times their squares: `fingerprints_match` takes the sums.

    They are so small that float64 adds those of `size` ranks, and squares a sum, without rounding.
    """
    bits = min(20, 26 - (size - 1).bit_length())
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    hashed = [digest >> bits * n & (2**bits - 1) for n in range(_HASHES)]
    return [*hashed, *(size * h * h for h in hashed)]


def fingerprints_match(sums: Sequence[float]) -> bool:
    """Decide from the sums of all ranks' `fingerprint_slots` whether they are of the same text.

    By Cauchy and Schwarz, W times the sum of squares is the square of the sum exactly if all
    terms are equal.
    """
    half = len(sums) // 2
    return all(a * a == b for a, b in zip(sums[:half], sums[half:], strict=True))

"""An all-reduce that first compares the structures of the ranks' values by a fingerprint.

If sizes differ between ranks, gloo returns wrong numbers or ends the process, and other backends
hang or continue. So the first collective, the header, has a fixed size. It carries hashes of the
structure and the first numbers. Ranks send more only if the hashes agree.
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

from pardata._pytree import KeyPath, keystr, leaves_with_path, map_with_path, require_dense
from pardata.collectives._comm_errors import explain_comm_errors
from pardata.environment._device import has_accelerator_backend, widest_float_dtype
from pardata.environment._world import cpu_group_and_device, require_world, store_client
from pardata.store._current_op import check_allowed
from pardata.store._round import compare_facts

_T = TypeVar("_T")

# Slots of the header, float64 of shape (64,): 3 hashes, their squares (or negatives), 58 numbers.
HEADER = 64
_HASHES = 3
HASHED = 2 * _HASHES
PAYLOAD_SLOTS = HEADER - HASHED

# A dense tensor or a real number (a bool and a NumPy scalar are numbers).
Leaf: TypeAlias = Tensor | float

# Returns the leaves of a value by their paths.
FindLeaves: TypeAlias = Callable[[], dict[KeyPath, Any]]

# Waits for the sum over all ranks of each number of a collective.
WaitSums: TypeAlias = Callable[[], list[float]]
# Waits for the minimum and maximum of each.
WaitMinMax: TypeAlias = Callable[[], list[tuple[int, int]]]


class CheckedCollective:
    """The leaves of this rank's value, and an all-reduce that first compares their structure.

    Attributes:
        world: the world of this process.
        device: the device of the header: the CPU if the group reduces there, so that reading it
            waits for no GPU.
        exact: whether integers stay integers.
        leaves: the leaves of the value.
        wire_dtypes: of each leaf the dtype in which the accelerator's backend reduces it; None for
            one that is reduced on the CPU.
    """

    def __init__(
        self, call: str, find: FindLeaves, describe: Callable[[Any], str], *, exact: bool = False
    ) -> None:
        check_allowed(call)
        self.world, self._call, self.exact = require_world(call), call, exact
        # Chosen by the world, which is the same on all ranks, and not by the values.
        self._group, self.device = cpu_group_and_device(self.world)
        self._error: Exception | None = None
        found = self.capture(find, {})
        self._paths, self.leaves = list(found), list(found.values())
        self._kinds = self.capture(lambda: [describe(leaf) for leaf in self.leaves], [])
        on_wire = self.world.size == 1 or has_accelerator_backend(self.world.backend)
        self.wire_dtypes = [self._wire_dtype(leaf) if on_wire else None for leaf in self.leaves]

    def capture(self, work: Callable[[], Any], otherwise: Any) -> Any:
        """Return ``work()``, or `otherwise` if it raises; then `all_reduce` raises on all ranks."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001  # the other ranks wait
            self._error = self._error or error
            return otherwise

    def all_reduce(self, pack: Callable[[], list[float]]) -> list[float]:
        """Return the sums over ranks of the numbers of ``pack()``, at most `PAYLOAD_SLOTS`.

        If a leaf is on a GPU on some ranks only, all leaves go to the CPU, and `pack` is called
        again.

        Raises:
            RuntimeError: on every rank: the structures differ, or a rank has captured an error,
                which it raises itself.
        """
        numbers: list[float] = self.capture(pack, [])
        if self.world.size == 1:
            if self._error is not None:
                raise self._error
            return numbers
        before = self.wire_dtypes
        sums = self.start(numbers, later=False)()  # takes 10 microseconds less
        return sums if before is self.wire_dtypes else self.all_reduce(pack)

    def start(self, numbers: list[float], *, later: bool = True) -> WaitSums:
        """Start to sum a few numbers over all ranks; return a function that waits for the sums.

        The function raises as `all_reduce` does, and must be called once on every rank.
        """
        wait = self._reduced([*self._fingerprint(), *numbers], dist.ReduceOp.SUM, later=later)

        def sums() -> list[float]:
            back = wait()
            if not fingerprints_match(back[:HASHED]):
                self._raise_mismatch()
                self.wire_dtypes = [None] * len(self.leaves)  # only these differ
            return back[HASHED : HASHED + len(numbers)]

        return sums

    def start_min_max(self, numbers: Sequence[int]) -> WaitMinMax:
        """Start a MIN and MAX all-reduce of integers below 2**53; return a function that waits."""
        signed = [*self._fingerprint()[:_HASHES], *numbers]
        # min(x) = -max(-x), so one MAX all-reduce returns both.
        both = [sign * number for number in signed for sign in (1, -1)]
        wait = self._reduced(both, dist.ReduceOp.MAX, later=True)

        def least_and_most() -> list[tuple[int, int]]:
            with explain_comm_errors(self._call):
                back = wait()
            found = zip(back[::2], back[1::2], strict=True)
            pairs = [(-int(least), int(most)) for most, least in found]
            if any(least != most for least, most in pairs[:_HASHES]):
                self._raise_mismatch()
            return pairs[_HASHES : len(signed)]

        return least_and_most

    def _fingerprint(self) -> list[int]:
        # A rank with an error takes part, with a fingerprint that differs from all others.
        refused = None if self._error is None else self.world.rank
        text = f"{self._call} {self._paths} {self._kinds} {self.wire_dtypes} {refused}"
        return fingerprint_slots(text, self.world.size)

    def _reduced(self, numbers: Sequence[float], op: Any, *, later: bool) -> WaitSums:
        """Start the all-reduce of the header, of shape (64,); return a function that waits."""
        sent = array("d", [*numbers, *[0.0] * (HEADER - len(numbers))])
        # Faster than torch.tensor.
        header = torch.frombuffer(sent, dtype=torch.float64).to(self.device)
        work: Any = None
        if self.world.size > 1:
            work = dist.all_reduce(header, op, group=self._group, async_op=later)

        def reduced() -> list[float]:
            if work is not None:
                work.wait()
            back: list[float] = header.tolist()
            return back

        return reduced

    def _raise_mismatch(self) -> None:
        """Raise on every rank, with a table of the calls or structures of the ranks."""
        cure = "Make the same call with the same structure on every rank."
        compare_facts(store_client(), self._call, lambda: {"structure": self._facts()}, cure)

    def group(self, tensor: Tensor) -> Any:
        """Return the process group that reduces `tensor`."""
        return self._group if tensor.device == self.device else None

    def leaves_with(self, way: torch.dtype | None) -> list[Leaf]:
        """Return the leaves with this wire dtype."""
        return [leaf for leaf, one in zip(self.leaves, self.wire_dtypes, strict=True) if one is way]

    def vector(self, numbers: list[float]) -> Tensor:
        """Return numbers as a float64 vector on the device of the header."""
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)

    def rebuilt(self, value: _T, replacements: Iterable[Any], is_leaf: Any = None) -> _T:
        """Return a value of the structure of `value` with other leaves."""
        found = dict(zip(self._paths, replacements, strict=True))
        result: _T = map_with_path(value, lambda path, _: found[path], is_leaf=is_leaf)
        return result

    def _wire_dtype(self, leaf: Any) -> torch.dtype | None:
        is_near = not isinstance(leaf, Tensor) or leaf.is_cpu
        if is_near or widest_float_dtype(leaf.device) != torch.float64:
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
        TypeError: a leaf is no number; the error names its path, as ``value['loss'][2]``.
    """
    return {path: number_of(leaf, path) for path, leaf in leaves_with_path(value, by_text=True)}


def number_of(leaf: Any, path: KeyPath, name: str = "value") -> Leaf:
    """Return `leaf` if it is a number or a dense tensor; see `numbers_of`."""
    # By exact type first: metrics are reduced often, and an abstract class takes a microsecond.
    if type(leaf) is float or type(leaf) is int:
        return leaf
    if isinstance(leaf, Tensor):
        require_dense(leaf, name, path)
        must, but = "a dense tensor of real numbers", "complex: convert it first"
        if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.layout != torch.strided:
            but = f"a {leaf.layout} {type(leaf).__name__}: convert it first"
        elif not leaf.is_complex():
            return leaf
    else:
        if getattr(leaf, "ndim", None) == 0 and hasattr(leaf, "item"):
            leaf = leaf.item()  # NumPy's bool is no Real
        if isinstance(leaf, Real):
            return leaf  # type: ignore[return-value]  # Real is the base class of numbers
        must, but = "a number or a tensor", f"{reprlib.repr(leaf)} ({type(leaf).__name__})"
    raise TypeError(f"`{keystr(name, path)}` must be {must}, but is {but}")


@functools.lru_cache(maxsize=64)  # a training loop repeats the same few texts
def fingerprint_slots(text: str, size: int) -> list[int]:
    """Return 3 hashes of `text`, and `size` times their squares, for `fingerprints_match`.

    They have so few bits that float64 adds those of `size` ranks, and squares a sum, without
    rounding.
    """
    bits = min(20, 26 - (size - 1).bit_length())
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    hashed = [digest >> bits * n & (2**bits - 1) for n in range(_HASHES)]
    return [*hashed, *(size * h * h for h in hashed)]


def fingerprints_match(sums: Sequence[float]) -> bool:
    """Return whether the sums of all ranks' `fingerprint_slots` come from one text.

    Cauchy-Schwarz: for W ranks, W·Σh² = (Σh)² exactly if all h are equal.
    """
    half = len(sums) // 2
    return all(a * a == b for a, b in zip(sums[:half], sums[half:], strict=True))

"""Values as they are, of all ranks or of rank 0, to all; what is no tensor or number is pickled."""

import io
import math
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.serialization import default_restore_location

from pardata.collective._explanation import explained
from pardata.collective._header import Matching, number_of, plain
from pardata.collective._tree import TreePath, leaves
from pardata.ranks._world import require_world

_T = TypeVar("_T")


def all_gather(value: _T) -> list[_T]:
    """Return the `value` of every rank, in rank order. Collective.

    `value` is a tensor, a number, anything else, or nested dicts, lists and tuples of them. Tensors
    may differ between ranks in their first dimension (zero rows included) and in nothing else. They
    keep their dtype and device and carry no gradient; numbers become ``int``, ``float`` or
    ``bool``. Any part without tensors and numbers, as a text or a list of texts of any length, is
    pickled; tensors inside other objects come on the CPU. Two small collectives and one of all the
    data, whatever the number of leaves. In a single process: ``[value]``, copied.

    Raises:
        Exception: for what cannot be pickled, as `pickle` raises it.
        TypeError: for a sparse or complex tensor; names its path.
        RuntimeError: where structures, dtypes or other dimensions differ, with a table. All errors
            are raised on every rank, and the group is usable afterwards.

    >>> all_gather({"rows": torch.arange(3), "names": ["a", "b"]})
    [{'rows': tensor([0, 1, 2]), 'names': ['a', 'b']}]
    """

    def find() -> dict[TreePath, Any]:
        found = leaves(value, by_text=True, is_leaf=_is_other)
        return {path: x if _is_other(x) else number_of(x, path) for path, x in found}

    matching = Matching("all_gather", find, _text)
    parts = matching.guarded(lambda: [_as_tensor(leaf) for leaf in matching.leaves], [])
    with explained("all_gather"):
        matching.all_reduce(list)
        return _gathered(value, matching, parts)


def broadcast(value: _T) -> _T:
    """Return rank 0's `value` on every rank; what the others pass is not looked at. Collective.

    `value` is anything that can be pickled, tensors of any dtype, shape and size included, alone or
    inside other objects. What was on the CPU comes on the CPU, and what was on rank 0's GPU on the
    receiving rank's `world().device`. Rank 0 gets `value` itself, and so does a single process.

    Raises:
        Exception: for what cannot be pickled, as `pickle` raises it; all errors are raised on every
            rank, and the group is usable afterwards.
        RuntimeError: where other ranks are in another call.

    >>> broadcast({"seed": 3, "order": torch.tensor([2, 0, 1])})
    {'seed': 3, 'order': tensor([2, 0, 1])}
    """
    here = require_world("broadcast")
    if here.size == 1:
        return value
    matching = Matching("broadcast", dict, _text)
    data = matching.guarded(lambda: pickled(value), bytearray()) if here.is_main else bytearray()
    with explained("broadcast"):
        (length,) = matching.all_reduce(lambda: [len(data)])
        data = data or bytearray(int(length))
        told = torch.frombuffer(data, dtype=torch.uint8).to(matching.device)
        dist.broadcast(told, 0, group=matching.group(told))
    return value if here.is_main else unpickled(_bytes_of(told), here.device)


def pickled(value: object) -> bytearray:
    """Return `value` in bytes; fail here, with the cause, where other ranks could not read it."""
    torch.save(value, buffer := io.BytesIO())
    unpickled(data := bytearray(buffer.getbuffer()))
    return data


def unpickled(data: bytes | bytearray, device: object = "cpu") -> Any:
    """Return what another rank pickled; what was on its GPU comes on `device`."""

    def placed(storage: Any, where: str) -> Any:
        return default_restore_location(storage, where if where == "cpu" else str(device))

    return torch.load(io.BytesIO(data), map_location=placed, weights_only=False)


def _gathered(value: _T, matching: Matching, parts: list[Tensor]) -> list[_T]:
    # What each rank brings: the rows of every leaf, then all bytes, padded to the longest.
    rows = [len(part) if part.ndim else 1 for part in parts]
    wide = torch.tensor(rows, dtype=torch.int64, device=matching.device)
    all_rows: list[list[int]] = _gather(matching, wide).tolist()
    row_bytes = [math.prod(part.shape[1:]) * part.element_size() for part in parts]
    sizes = [[n * b for n, b in zip(r, row_bytes, strict=True)] for r in all_rows]
    device = matching.here.device if any(matching.ways) else matching.device
    # Clones: one element of a column counts as contiguous, yet its stride forbids the view.
    flat = [p.reshape(-1).clone(memory_format=torch.contiguous_format) for p in parts]
    own = torch.cat([part.view(torch.uint8).to(device) for part in flat])
    padded = pad(own, (0, max(map(sum, sizes)) - len(own)))
    found = []
    for counts, size, row in zip(all_rows, sizes, _gather(matching, padded), strict=True):
        pieces = map(_from_bytes, matching.leaves, parts, counts, row[: sum(size)].split(size))
        found.append(matching.rebuilt(value, pieces, _is_other))
    return found


def _is_other(part: object) -> bool:
    """Return whether there is no tensor and no number in it, so that it is pickled as a whole."""
    return not any(isinstance(plain(leaf), Tensor | Real) for _, leaf in leaves(part))


def _text(leaf: Any) -> str:
    if _is_other(leaf):
        return "no tensor or number"
    part = _as_tensor(leaf)
    shape = "x".join(["rows", *map(str, part.shape[1:])]) if part.ndim else "number"
    return f"{shape} of {part.dtype}"


def _as_tensor(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf.detach().resolve_neg()  # a lazy minus sign is not in the bytes
    if _is_other(leaf):
        return torch.frombuffer(pickled(leaf), dtype=torch.uint8)
    if isinstance(leaf, Integral):
        return torch.tensor(leaf if isinstance(leaf, bool) else int(leaf))
    return torch.tensor(float(leaf), dtype=torch.float64)


def _from_bytes(own: Any, part: Tensor, rows: int, piece: Tensor) -> Any:
    if not isinstance(own, Tensor) and _is_other(own):
        return unpickled(_bytes_of(piece))
    shape = (rows, *part.shape[1:]) if part.ndim else ()
    # A copy: a view may begin where an element of this dtype may not.
    tensor = piece.clone().view(part.dtype).view(shape).to(part.device)
    return tensor if isinstance(own, Tensor) else tensor.item()


def _bytes_of(piece: Tensor) -> bytearray:
    data = bytearray(len(piece))
    torch.frombuffer(data, dtype=torch.uint8).copy_(piece)  # needs no NumPy
    return data


def _gather(matching: Matching, flat: Tensor) -> Tensor:
    """Stack the vectors, of one length, of all ranks."""
    if matching.here.size == 1:
        return flat[None]
    stacked = [torch.empty_like(flat) for _ in range(matching.here.size)]
    dist.all_gather(stacked, flat, group=matching.group(flat))
    return torch.stack(stacked)

"""Gather the values of all ranks, or broadcast rank 0's; anything but tensors is pickled."""

import io
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.serialization import default_restore_location

from pardata._pytree import KeyPath, bytes_of, leaves_with_path, require_dense
from pardata._validation import check_bool
from pardata.collectives._comm_errors import explain_comm_errors
from pardata.collectives._fingerprint import CheckedCollective, number_of
from pardata.environment._world import World, cpu_group_and_device, require_world
from pardata.store._current_op import check_allowed
from pardata.store._rank_errors import format_ranks

_T = TypeVar("_T")


def all_gather(value: _T, *, differentiable: bool = False) -> list[_T]:
    """Return the `value` of every rank, in rank order. Collective.

    `value` is a tensor, anything else, or nested dicts, lists and tuples of them. Tensors may
    differ between ranks in their first dimension (zero rows included) and in nothing else. They
    keep their dtype and device. `all_gather` pickles any part without tensors, as a number, a text
    or a list of texts of any length. Tensors inside other objects come on the CPU. It takes two
    small collectives and one of all the data, whatever the number of leaves. In a single process it
    returns ``[value]``, copied.

    Args:
        value: the value of this rank.
        differentiable: let gradients flow back to the rank that has the tensor; by default tensors
            carry none. A rank's tensor gets the sum of the gradients of all ranks' losses. So
            `backward`, and ``loss.backward()`` under ``"ddp"``, give the gradient of the mean of
            these losses. Every rank must run the backward, which is collective, once for each
            tensor. It has no gradient itself.

    Raises:
        Exception: a value cannot be pickled; `pickle` raises it.
        TypeError: a tensor, whose path the error names, is sparse or complex. Or the flag is wrong.
        ValueError: a rank has no rows of a tensor that carries a gradient.
        RuntimeError: structures, dtypes or other dimensions differ; the error has a table. All
            errors come on every rank, and the group is usable afterwards.

    >>> all_gather({"rows": torch.arange(3), "names": ["a", "b"]})
    [{'rows': tensor([0, 1, 2]), 'names': ['a', 'b']}]
    """

    def find() -> dict[KeyPath, Any]:
        check_bool("differentiable", differentiable)
        found = leaves_with_path(value, by_text=True, is_leaf=_is_opaque)
        return {path: number_of(x, path) if isinstance(x, Tensor) else x for path, x in found}

    def text(leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return "no tensor"
        shape = "x".join(["rows", *map(str, leaf.shape[1:])]) if leaf.ndim else "number"
        differs = ", differentiable" * (differentiable and _has_gradient(leaf))
        return f"{shape} of {leaf.dtype}{differs}"

    checked = CheckedCollective("all_gather", find, text)
    parts = checked.capture(lambda: [_as_tensor(leaf) for leaf in checked.leaves], [])
    with explain_comm_errors("all_gather"):
        checked.all_reduce(list)
        columns = _gather(checked, parts)
    for number, leaf in enumerate(checked.leaves):
        if differentiable and _has_gradient(leaf):
            columns[number] = _DifferentiableAllGather.apply(checked, columns[number], leaf)
    # There is a column, because an empty container is a leaf.
    return [checked.rebuilt(value, rank, _is_opaque) for rank in zip(*columns, strict=True)]


class _DifferentiableAllGather(torch.autograd.Function):
    """An all-gather whose backward sums the gradients of each rank's tensor over all ranks."""

    @staticmethod
    def forward(ctx: Any, checked: CheckedCollective, of_ranks: Any, leaf: Tensor) -> Any:
        if none := [rank for rank, tensor in enumerate(of_ranks) if not tensor.numel()]:
            raise ValueError(
                f"every rank must have rows of what is `differentiable`, but {format_ranks(none)} "
                f"passed none: pass drop_last=True to make_loader, or a larger batch_size"
            )
        ctx.world, ctx.group = checked.world, checked.group(leaf)
        return tuple(of_ranks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        local = gradients[ctx.world.rank]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        # A sum in 16 bits would round.
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        if ctx.world.size > 1:
            with explain_comm_errors("all_gather (backward)"):
                dist.all_reduce(flat, group=ctx.group)
        mine = flat.split([gradient.numel() for gradient in gradients])[ctx.world.rank]
        return None, None, mine.view(local.shape).to(local.dtype)


def broadcast(value: _T) -> _T:
    """Return rank 0's `value` on every rank; other ranks' values are ignored. Collective.

    `value` is anything that can be pickled, tensors of any dtype, shape and size included, alone or
    inside other objects. What was on the CPU comes on the CPU, and what was on rank 0's GPU on the
    receiving rank's `world().device`. Rank 0 gets `value` itself, and so does a single process.

    Raises:
        Exception: for what cannot be pickled, as `pickle` raises it; all errors are raised on every
            rank, and the group is usable afterwards.
        RuntimeError: other ranks are in another call.

    >>> broadcast({"seed": 3, "order": torch.tensor([2, 0, 1])})
    {'seed': 3, 'order': tensor([2, 0, 1])}
    """
    check_allowed("broadcast")
    world = require_world("broadcast")
    if world.size == 1:
        return value
    data = broadcast_bytes("broadcast", lambda: serialize(value) if world.is_main else bytearray())
    return value if world.is_main else deserialize(data, world.device)


def broadcast_bytes(call: str, make: Callable[[], bytearray]) -> bytearray:
    """Return rank 0's bytes from `make`; every rank raises an error of `make`. Collective."""
    checked = CheckedCollective(call, dict, str)
    data = checked.capture(make, bytearray())
    with explain_comm_errors(call):
        (length,) = checked.all_reduce(lambda: [len(data)])
        payload = torch.frombuffer(data or bytearray(int(length)), dtype=torch.uint8)
        payload = payload.to(checked.device)
        dist.broadcast(payload, 0, group=checked.group(payload))
    return bytes_of(payload)


def gather_to_rank_zero(world: World, value: _T, group: Any = None) -> list[_T]:
    """Return the small `value` of every rank on rank 0, and nothing on the others. Collective.

    torch's ``gather_object`` would need NumPy.
    """
    if world.size == 1:
        return [value]
    default, device = cpu_group_and_device(world)
    group, data = group or default, serialize(value)
    lengths = _stack_from_ranks(torch.tensor([len(data)], device=device), world.size, group)
    local = torch.frombuffer(data, dtype=torch.uint8).to(device)
    sent = torch.nn.functional.pad(local, (0, int(lengths.max()) - len(data)))
    pairs = zip(_stack_from_ranks(sent, world.size, group), lengths.flatten(), strict=True)
    return [deserialize(bytes_of(part[:n])) for part, n in pairs if world.is_main]


def serialize(value: object) -> bytearray:
    """Return `value` as bytes; raise on this rank if other ranks could not deserialize them."""
    require_dense(value, "value")
    torch.save(value, buffer := io.BytesIO())
    deserialize(data := bytearray(buffer.getbuffer()))
    return data


def deserialize(data: bytes | bytearray, device: object = "cpu") -> Any:
    """Return the value that another rank serialized, with its GPU tensors on `device`."""

    def location(storage: Any, where: str) -> Any:
        return default_restore_location(storage, where if where == "cpu" else str(device))

    return torch.load(io.BytesIO(data), map_location=location, weights_only=False)


def _gather(checked: CheckedCollective, parts: list[Tensor]) -> list[Any]:
    """Return for each leaf a list of the leaves of all ranks."""
    # First the number of rows of every leaf, then all bytes, padded to the longest rank's.
    rows = [len(part) if part.ndim else 1 for part in parts]
    wide = torch.tensor(rows, dtype=torch.int64, device=checked.device)
    size = checked.world.size
    all_rows: list[list[int]] = _stack_from_ranks(wide, size, checked.group(wide)).tolist()
    row_bytes = [math.prod(part.shape[1:]) * part.element_size() for part in parts]
    sizes = [[n * b for n, b in zip(r, row_bytes, strict=True)] for r in all_rows]
    device = checked.world.device if any(checked.wire_dtypes) else checked.device
    # Clones, because a column of one element counts as contiguous, and its stride forbids the view.
    flat = [p.reshape(-1).clone(memory_format=torch.contiguous_format) for p in parts]
    local = torch.cat([part.view(torch.uint8).to(device) for part in flat])
    padded = torch.nn.functional.pad(local, (0, max(map(sum, sizes)) - len(local)))
    sent = zip(_stack_from_ranks(padded, size, checked.group(padded)), sizes, strict=True)
    received = [row[: sum(lengths)].split(lengths) for row, lengths in sent]
    both = zip(zip(*all_rows, strict=True), zip(*received, strict=True), strict=True)
    return [
        [_from_bytes(leaf, part, n, data) for n, data in zip(*column, strict=True)]
        for leaf, part, column in zip(checked.leaves, parts, both, strict=True)
    ]


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()


def _is_opaque(value: object) -> bool:
    """Return whether `value` holds no tensor, so that it is pickled."""
    return not any(isinstance(leaf, Tensor) for _, leaf in leaves_with_path(value))


def _as_tensor(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf.detach().resolve_neg()  # the bytes of a lazily negated tensor lack the sign
    return torch.frombuffer(serialize(leaf), dtype=torch.uint8)


def _from_bytes(leaf: Any, part: Tensor, rows: int, data: Tensor) -> Any:
    if not isinstance(leaf, Tensor):
        return deserialize(bytes_of(data))
    shape = (rows, *part.shape[1:]) if part.ndim else ()
    # A copy, because the slice need not be aligned for this dtype.
    return data.clone().view(part.dtype).view(shape).to(part.device)


def _stack_from_ranks(flat: Tensor, size: int, group: Any) -> Tensor:
    """Gather a vector of the same length from each rank; the result has shape (size, length)."""
    if size == 1:
        return flat[None]
    stacked = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(stacked, flat, group=group)
    return torch.stack(stacked)

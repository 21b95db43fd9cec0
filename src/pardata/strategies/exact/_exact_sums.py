"""The gradients of a step, added in the fixed tree, and sent in buckets while a backward runs."""

import zlib
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch import Tensor, nn

from pardata.step._count import Piece
from pardata.strategies.exact._fixed_tree import Stack
from pardata.strategies.exact._ordered_sum import NOTHING, Exchange, OrderedSum

_BUCKET = 2**20  # numbers that are sent together: 4 MiB
_AHEAD = 2  # buckets that are sent before the first of them is added: what is received takes room

# A gradient for each parameter of a bucket; None if it was not used.
_Gradients: TypeAlias = list[Tensor | None]


class Bucket:
    """Parameters of one dtype, whose gradients are added and sent together.

    In float32 at least, a complex number as two. Lives from step to step.

    Args:
        parameters: in the order in which gradients come.

    Attributes:
        missing: those that have got no gradient from the backward that runs.
        is_taken: whether the gradients of that were added.
        has_several: whether a backward has given one of the parameters several gradients.
        waits: whether they are added only after a backward: if so, or as long as that is not known.
        used: which of the parameters had a gradient in this step.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        kind = parameters[0].dtype
        self._is_complex = kind.is_complex
        real = kind.to_real() if kind.is_complex else kind
        self.dtype = real if real == torch.float64 else torch.float32
        self.places: list[tuple[slice, torch.Size, tuple[int, ...]]] = []
        self.length = 0
        for parameter in parameters:
            # In its own layout, as PyTorch's: fused optimizers insist on it.
            layout = torch.empty_like(parameter, dtype=kind, device="meta")
            layout = torch.view_as_real(layout) if kind.is_complex else layout
            end = self.length + layout.numel()
            self.places.append((slice(self.length, end), layout.shape, layout.stride()))
            self.length = end
        self.has_several, self.waits = False, True

    def begin_step(self, exchange: Exchange) -> None:
        """Forget the step before."""
        self._exchange = exchange
        self._stack = Stack[_Gradients](exchange.count, _added)
        self.used = [False] * len(self.parameters)
        self.sum: OrderedSum | None = None

    def begin(self) -> None:
        """Forget the microbatch before."""
        self.missing = set(self.parameters)
        self.is_taken = False

    def take(self, number: int, *, counts: bool) -> None:
        """Add the gradients that the parameters have, as those of a microbatch."""
        gradients = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self.is_taken = True
        leaf: _Gradients | None = None
        if counts and any(g is not None for g in gradients):
            leaf = [None if g is None else self._real(g) for g in gradients]
            self.used = [u or g is not None for u, g in zip(self.used, gradients, strict=True)]
        self._stack.push((number, number + 1), leaf)

    def _real(self, gradient: Tensor) -> Tensor:
        gradient = gradient.detach()
        return (torch.view_as_real(gradient) if self._is_complex else gradient).to(self.dtype)

    def send(self, riders: Tensor | None = None) -> None:
        """Send the subtrees' sums here, and `riders` behind them. Collective."""
        exchange, behind = self._exchange, 0 if riders is None else len(riders)
        device = self.parameters[0].device
        rows = exchange.rows(self.length + behind, self.dtype, device)
        # A rank that has failed has other subtrees, and no rank will use the sum.
        for row, piece in zip_longest(rows, self._stack.values()[: len(rows)]):
            both = list(zip(self._parts(row), piece or [None], strict=False))
            found = [(part, gradient) for part, gradient in both if gradient is not None]
            if len(found) < len(self.parameters):
                row.fill_(NOTHING)
            if found:
                parts, gradients = map(list, zip(*found, strict=True))
                torch._foreach_copy_(parts, gradients)  # as optimizers do
        rows[:, self.length :] = NOTHING
        if riders is not None:
            rows[0, self.length : self.length + behind] = riders
        self._stack.pieces.clear()
        self.sum = exchange.start(rows)

    def _parts(self, row: Tensor) -> list[Tensor]:
        """Return the numbers of each parameter, in its layout."""
        return [row[where].as_strided(shape, stride) for where, shape, stride in self.places]

    def finish(self) -> None:
        """Wait for the sums."""
        assert self.sum is not None  # noqa: S101  # it was sent
        self._sums, self.sum = self.sum.result(), None

    def told(self) -> Tensor:
        """Return the sums of the riders of all ranks."""
        return self._sums[self.length :]

    def set_gradients(self, used: Iterable[bool]) -> None:
        """Set the gradients of the parameters that are used to the sums."""
        parts = self._parts(self._sums)
        del self._sums  # whose memory is that of the gradients
        for parameter, part, is_used in zip(self.parameters, parts, used, strict=True):
            if is_used:
                whole = torch.view_as_complex(part) if self._is_complex else part
                parameter.grad = whole.to(parameter.dtype)


def _added(left: _Gradients, right: _Gradients) -> _Gradients:
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])  # as optimizers do
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


class Sums:
    """Adds up the gradients of this rank's microbatches, and those of all ranks.

    Lives as long as the same is trained.

    Args:
        parameters: those that are trained, by name.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self._layouts = _layouts_of(parameters)
        # The same on all ranks which train the same.
        self.digest = zlib.crc32(repr([*parameters, *self._layouts]).encode())
        self.buckets = [Bucket(part) for part in _parted(parameters.values())]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}

    def are_of(self, parameters: dict[str, nn.Parameter]) -> bool:
        """Whether these are the parameters, in layouts that have not changed."""
        known = map(id, self.parameters.values())
        return [*known] == [*map(id, parameters.values())] and (
            self._layouts == _layouts_of(parameters)
        )

    def begin_step(self, exchange: Exchange, may_send: Callable[[], bool]) -> None:
        """Begin a step.

        Args:
            exchange: of it.
            may_send: returns whether all ranks send the same: nothing is sent where they do not.
        """
        self._may_send, self._sent, self._added = may_send, 0, 0
        for bucket in self.buckets:
            bucket.begin_step(exchange)
        # On a CPU the last one takes along what is known only after the backward.
        self._early = sum(not p.is_cpu for b in self.buckets[-1:] for p in b.parameters[:1])
        self._early += len(self.buckets[:-1])

    def begin(self, piece: Piece, *, last: bool) -> None:
        """Begin a microbatch, whose gradients come to `receive`; what counts 0 leaves none."""
        self._number, self._counts, self._is_last = piece.number, piece.count > 0, last
        for bucket in self.buckets:
            bucket.begin()

    def receive(self, parameter: nn.Parameter) -> None:
        """Take note that a parameter has got a gradient, be it one of several."""
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            raise RuntimeError(
                f"what is trained must not change within a step under strategy 'exact', but a "
                f"parameter of shape {tuple(parameter.shape)} got a gradient that was frozen, or "
                f"not there, when it began: call requires_grad_() before backward"
            )
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise TypeError(
                f"gradients must be dense under strategy 'exact', but that of "
                f"`{self._name(parameter)}` is sparse: make the embedding with sparse=False"
            )
        if parameter not in bucket.missing:
            self._receive_again(bucket, parameter)
        bucket.missing.discard(parameter)
        if not bucket.missing and not bucket.waits and self._counts:
            self._take(bucket)

    def _receive_again(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Wait from now on: what one backward gives a parameter is added to no other's before."""
        bucket.waits = bucket.has_several = True
        if bucket.is_taken:
            raise RuntimeError(
                f"a parameter must get its gradient at once, or several in each step, under "
                f"strategy 'exact', but `{self._name(parameter)}` got another one when the first "
                f"was already added: run this step again, from which on that is waited for, or "
                f"pass use_reentrant=False to checkpoint"
            )

    def _name(self, parameter: nn.Parameter) -> str:
        return next(name for name, p in self.parameters.items() if p is parameter)

    def _take(self, bucket: Bucket) -> None:
        bucket.take(self._number, counts=self._counts)
        if self._is_last:
            self.send()

    def end(self) -> None:
        """End a microbatch: add what is left of it."""
        for bucket in self.buckets:
            if not bucket.is_taken and self._number >= 0:
                bucket.take(self._number, counts=self._counts)
            if self._counts:
                bucket.waits = bucket.has_several
        for parameter in self.parameters.values():
            parameter.grad = None  # what it came from does not count
        if self._is_last:
            self.send()

    def send(self) -> None:
        """Send what is complete. Collective, as is what follows."""
        # In the same order on every rank, whichever is complete first.
        while self._sent < self._early and self.buckets[self._sent].is_taken and self._may_send():
            self._send_next()

    def send_rest(self, riders: Tensor | None = None) -> None:
        """Send all that is left, and `riders` with the last of it."""
        while self._sent < len(self.buckets):
            is_last = self._sent == len(self.buckets) - 1
            self._send_next(riders if is_last else None)

    def _send_next(self, riders: Tensor | None = None) -> None:
        self.buckets[self._sent].send(riders)
        self._sent += 1
        self._add_up(self._sent - _AHEAD)

    def _add_up(self, count: int) -> None:
        """Add so many buckets, on their owners."""
        for bucket in self.buckets[self._added : max(count, 0)]:
            assert bucket.sum is not None  # noqa: S101  # it was sent
            bucket.sum.add()
            self._added += 1

    def finish(self) -> None:
        """Add what was sent, and wait for the sums."""
        self._add_up(len(self.buckets))
        for bucket in self.buckets:
            bucket.finish()

    def told(self) -> Tensor:
        """Return the sums of the riders of all ranks."""
        return self.buckets[-1].told()

    def used(self) -> list[bool]:
        """Return which parameters have had a gradient here, bucket by bucket."""
        return [used for bucket in self.buckets for used in bucket.used]

    def set_gradients(self, used: list[bool]) -> None:
        """Set the gradients of the parameters that are `used` on any rank."""
        told = iter(used)
        for bucket in self.buckets:
            bucket.set_gradients([next(told) for _ in bucket.parameters])


def _layouts_of(parameters: dict[str, nn.Parameter]) -> list[tuple[object, ...]]:
    return [(p.dtype, p.shape, p.stride()) for p in parameters.values()]


def _parted(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return buckets of one dtype, from the last parameter to the first, as gradients come."""
    filled: list[list[nn.Parameter]] = []
    last: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in reversed(list(parameters)):
        bucket = last.get(parameter.dtype)
        if bucket is None or sum(p.numel() for p in [*bucket, parameter]) > _BUCKET:
            bucket = last[parameter.dtype] = []
            filled.append(bucket)
        bucket.append(parameter)
    return filled

"""The gradients of a step as sums in fixed point, sent in buckets while the backward still runs."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pardata.gradient import _fixed_point
from pardata.gradient._exact_report import Largest

_BUCKET = 2**20  # numbers that are sent together: 8 MiB


class Bucket:
    """Parameters whose sums are sent together: low words as soon as all of them are complete."""

    def __init__(self, places: dict[str, slice], device: torch.device) -> None:
        self.places = places
        self._length = max((place.stop for place in places.values()), default=0)
        self._device = device
        self.low = torch.empty(self._length, dtype=torch.int64, device=device)
        self.empty()

    def empty(self) -> None:
        """Begin a step: there is nothing in any sum, and nothing is sent."""
        self.low.zero_()
        self._late: Tensor | None = None  # low words of what came when those had been sent
        self._high: Tensor | None = None  # sent at the end, and only where there are any
        self.waits_for = set(self.places)
        self.is_sent = False
        self.work: Any = None  # what is waited for, where there are other ranks

    @property
    def is_late(self) -> bool:
        return self._late is not None

    @property
    def high(self) -> Tensor:
        if self._high is None:
            self._high = self._zeros()
        return self._high

    @property
    def late(self) -> Tensor:
        if self._late is None:
            self._late = self._zeros()
        return self._late

    def open(self) -> Tensor:
        """Return the low words to which more can be added."""
        return self.late if self.is_sent else self.low

    def _zeros(self) -> Tensor:
        return _fixed_point.zeros(self._length, self._device)


class Sums:
    """Takes the gradients of this rank's microbatches, and adds up those of all ranks.

    Args:
        parameters: those that are trained, by name.
        size: how many ranks there are.
        largest: is shown every gradient.
        may_send: whether the ranks have the same to send; asked before anything is.
        buckets: of these parameters.

    Attributes:
        buckets: with the sums.
        weight: of the microbatch that is run.
        used: which parameters have had a gradient, be it of weight 0.
        sparse: of which it was sparse.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        size: int,
        largest: Largest,
        may_send: Callable[[], bool],
        buckets: list[Bucket],
    ) -> None:
        self.parameters = parameters
        # By the parameter itself: it may have got another name since it was hooked.
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._may_send = may_send
        self._size = size
        self._largest = largest
        self.buckets = buckets
        self._bucket_of = {name: bucket for bucket in buckets for name in bucket.places}
        self._sent = 0
        self._is_last = False
        self._taken = dict.fromkeys(parameters, 0)
        self._large: set[str] = set()
        self.weight = 0.0
        self.used: set[str] = set()
        self.sparse: set[str] = set()

    def begin(self, *, last: bool) -> None:
        """Begin a microbatch, of no weight until it is given one."""
        self.weight, self._is_last = 0.0, last
        if last:
            for bucket in self.buckets:
                bucket.waits_for = set(bucket.places)

    def take(self, parameter: nn.Parameter) -> None:
        """Take the gradient that `parameter` has got, which may be one of several, and add it."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None  # noqa: S101  # PyTorch has just set it
        name = self._names.get(parameter)
        if name is None:
            msg = (
                f"what is trained must not change within a step under strategy 'exact', but a "
                f"parameter of shape {tuple(parameter.shape)} got a gradient that was frozen, or "
                f"not there, when it began: call requires_grad_() before backward"
            )
            raise RuntimeError(msg)
        bucket = self._bucket_of[name]
        self.used.add(name)
        if gradient.layout != torch.strided:
            self.sparse.add(name)
        elif self.weight:
            self._count(name)
            numbers = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            self._add(name, numbers)
        bucket.waits_for.discard(name)
        if self._is_last:
            self._send(only_complete=True)

    def send_rest(self) -> None:
        """Send what has not been sent yet. Collective, as is all that follows."""
        self._send(only_complete=False)

    def late(self) -> list[bool]:
        """Return for each bucket whether something came after it had been sent."""
        return [bucket.is_late for bucket in self.buckets]

    def receive(self, late: list[bool], large: set[str]) -> None:
        """Wait until the sums are those of all ranks.

        Args:
            late: what all ranks say of theirs.
            large: the parameters of which any has a gradient that needs high words.
        """
        self._large = large
        for bucket, is_late in zip(self.buckets, late, strict=True):
            if bucket.work is not None:
                bucket.work.wait()
            if is_late:
                self._all_reduce(bucket.late)
                bucket.low += bucket.late
            if large.intersection(bucket.places):
                self._all_reduce(bucket.high)

    def gradient(self, name: str) -> Tensor:
        """Return the sum for this parameter, in its shape and dtype."""
        # In the parameter's own layout, as PyTorch's gradients: fused optimizers insist on it.
        gradient = torch.empty_like(self.parameters[name], requires_grad=False)
        numbers = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        bucket = self._bucket_of[name]
        place = bucket.places[name]
        high = bucket.high[place] if name in self._large else None
        if numbers.is_contiguous():
            _fixed_point.value(bucket.low[place], high, numbers.view(-1))
        else:
            numbers.copy_(_fixed_point.value(bucket.low[place], high).view(numbers.shape))
        return gradient

    def _add(self, name: str, numbers: Tensor) -> None:
        bucket = self._bucket_of[name]
        place = bucket.places[name]
        is_large = self._largest.see(name, numbers) > _fixed_point.SMALL
        # A GPU is not waited for: it may write high words, of zero, that nobody asks for.
        high = bucket.high[place] if is_large.is_cuda or is_large else None
        _fixed_point.add(numbers, self.weight, bucket.open()[place], high, is_large)

    def _all_reduce(self, words: Tensor) -> None:
        if self._size > 1:
            dist.all_reduce(words)

    def _count(self, name: str) -> None:
        self._taken[name] += 1
        most = _fixed_point.MOST // self._size
        if self._taken[name] > most:
            msg = (
                f"a step must give a parameter at most {most} gradients on each of {self._size} "
                f"ranks under strategy 'exact', but `{name}` got more: make `microbatch_size` "
                f"larger"
            )
            raise OverflowError(msg)

    def _send(self, *, only_complete: bool) -> None:
        # In the same order on every rank, whichever is complete first.
        while self._sent < len(self.buckets):
            bucket = self.buckets[self._sent]
            if (only_complete and bucket.waits_for) or not self._may_send():
                return
            self._sent += 1
            bucket.is_sent = True
            if self._size > 1:
                bucket.work = dist.all_reduce(bucket.low, async_op=True)


def emptied(
    buckets: list[Bucket], parameters: dict[str, nn.Parameter], device: torch.device
) -> list[Bucket]:
    """Return empty buckets for these parameters on a device: the given ones, where they fit.

    So the memory of a step's words is that of the step before, as with DDP's buckets.
    """
    wanted = list(_filled(parameters))
    if [bucket.places for bucket in buckets] != wanted or buckets[0].low.device != device:
        return [Bucket(places, device) for places in wanted]
    for bucket in buckets:
        bucket.empty()
    return buckets


def _filled(parameters: dict[str, nn.Parameter]) -> Iterator[dict[str, slice]]:
    """Yield the places in each bucket, from the last parameter to the first, as gradients come."""
    places: dict[str, slice] = {}
    length = 0
    for name, parameter in reversed(parameters.items()):
        count = parameter.numel() * (2 if parameter.is_complex() else 1)
        if places and length + count > _BUCKET:
            yield places
            places, length = {}, 0
        places[name] = slice(length, length + count)
        length += count
    yield places

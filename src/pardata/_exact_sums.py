"""The gradients of a step as sums in fixed point, sent in buckets while the backward still runs."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pardata import _fixed_point
from pardata._exact_report import Largest

_BUCKET = 2**20  # numbers that are sent together: 16 MiB


class _Bucket:
    """Parameters whose sums are sent together."""

    def __init__(self, places: dict[str, slice], device: torch.device) -> None:
        self.places = places
        self._length = max((place.stop for place in places.values()), default=0)
        self._device = device
        self.words = _fixed_point.zeros(self._length, device)
        self.late: Tensor | None = None  # what came when the words had been sent
        self.waits_for = set(places)
        self.sent = False
        self.work: Any = None  # what is waited for, where there are other ranks

    def words_of(self, name: str) -> Tensor:
        return self.words[:, self.places[name]]

    def open_words_of(self, name: str) -> Tensor:
        """Return where more can be added for this parameter."""
        if not self.sent:
            return self.words_of(name)
        return self.late_words()[:, self.places[name]]

    def late_words(self) -> Tensor:
        if self.late is None:
            self.late = _fixed_point.zeros(self._length, self._device)
        return self.late


class Sums:
    """Takes the gradients of this rank's microbatches, and adds up those of all ranks.

    Args:
        parameters: those that are trained, by name.
        device: where the sums are.
        size: how many ranks there are.
        largest: is shown every gradient.
        may_send: whether the ranks have the same to send; asked before anything is.

    Attributes:
        weight: of the microbatch that is run.
        used: which parameters have had a gradient, be it of weight 0.
        sparse: of which it was sparse.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        device: torch.device,
        size: int,
        largest: Largest,
        may_send: Callable[[], bool],
    ) -> None:
        self.parameters = parameters
        # By the parameter itself: it may have got another name since it was hooked.
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._may_send = may_send
        self._size = size
        self._largest = largest
        self._buckets = list(_filled(parameters, device))
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.places}
        self._sent = 0
        self._is_last = False
        self._taken = dict.fromkeys(parameters, 0)
        self.weight = 0.0
        self.used: set[str] = set()
        self.sparse: set[str] = set()

    def begin(self, *, last: bool) -> None:
        """Begin a microbatch, of no weight until it is given one."""
        self.weight, self._is_last = 0.0, last
        if last:
            for bucket in self._buckets:
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
            self._largest.see(name, numbers)
            _fixed_point.add(bucket.open_words_of(name), numbers, self.weight)
        bucket.waits_for.discard(name)
        if self._is_last:
            self._send(only_complete=True)

    def send_rest(self) -> None:
        """Send what has not been sent yet. Collective, as is all that follows."""
        self._send(only_complete=False)

    def late(self) -> list[bool]:
        """Return for each bucket whether something came after it had been sent."""
        return [bucket.late is not None for bucket in self._buckets]

    def receive(self, late: list[bool]) -> None:
        """Wait until the sums are those of all ranks; `late` is what they all say of theirs."""
        for bucket, is_late in zip(self._buckets, late, strict=True):
            if bucket.work is not None:
                bucket.work.wait()
            if is_late:
                words = bucket.late_words()
                if self._size > 1:
                    dist.all_reduce(words)
                bucket.words += words

    def gradient(self, name: str) -> Tensor:
        """Return the sum for this parameter, in its shape and dtype."""
        parameter = self.parameters[name]
        words = self._bucket_of[name].words_of(name)
        numbers = _fixed_point.value(words, parameter.dtype.to_real())
        if parameter.is_complex():
            numbers = torch.view_as_complex(numbers.view(-1, 2))
        # In the parameter's own layout, as PyTorch's gradients: fused optimizers insist on it.
        gradient = torch.empty_like(parameter, requires_grad=False)
        return gradient.copy_(numbers.view(parameter.shape))

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
        while self._sent < len(self._buckets):
            bucket = self._buckets[self._sent]
            if (only_complete and bucket.waits_for) or not self._may_send():
                return
            self._sent += 1
            bucket.sent = True
            if self._size > 1:
                bucket.work = dist.all_reduce(bucket.words, async_op=True)


def _filled(parameters: dict[str, nn.Parameter], device: torch.device) -> Iterator[_Bucket]:
    """Yield buckets of the parameters, from the last to the first, as their gradients come."""
    places: dict[str, slice] = {}
    length = 0
    for name, parameter in reversed(parameters.items()):
        count = parameter.numel() * (2 if parameter.is_complex() else 1)
        if places and length + count > _BUCKET:
            yield _Bucket(places, device)
            places, length = {}, 0
        places[name] = slice(length, length + count)
        length += count
    yield _Bucket(places, device)

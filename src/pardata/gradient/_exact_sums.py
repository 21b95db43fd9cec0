"""The gradients of a step as sums in fixed point, sent in buckets while the backward still runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pardata.gradient import _fixed_point

_BUCKET = 2**20  # numbers that are sent together: 8 MiB


class Bucket(_fixed_point.Words):
    """Parameters whose sums are sent together: low words as soon as all of them are complete.

    Attributes:
        places: of each parameter, by name.
        missing: the parameters whose last gradient has not come.
        is_sent: whether the low words are on their way, to which nothing more can be added.
        late: the words of what came after that.
        work: what is waited for, where there are other ranks.
    """

    def __init__(self, places: dict[str, slice], low: Tensor) -> None:
        super().__init__(low)
        self.places = places
        self.missing = set(places)
        self.is_sent = False
        self.late: _fixed_point.Words | None = None
        self.work: Any = None

    def open(self) -> _fixed_point.Words:
        """Return the words to which more can be added."""
        if not self.is_sent:
            return self
        if self.late is None:
            self.late = _fixed_point.Words(torch.empty_like(self.low))
        return self.late


@dataclass
class _Summand:
    """A parameter: where its sum is, and how many gradients are in it."""

    name: str
    index: int
    bucket: Bucket
    count: int = 0


class Sums:
    """Adds up the gradients of this rank's microbatches, and those of all ranks.

    Args:
        parameters: those that are trained, by name.
        size: how many ranks there are.
        device: of the parameters.
        scratch: the memory of the step before: used again where it fits, as DDP's buckets are.

    Attributes:
        scratch: the memory of this step, for the next.
        peaks: of each parameter, the largest that a microbatch would add.
        used: which parameters have had a gradient, be it of weight 0.
        sparse: of which it was sparse.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        size: int,
        device: torch.device,
        scratch: list[Tensor],
    ) -> None:
        self._parameters = parameters
        self._size = size
        self._buckets = _empty(list(_filled(parameters)), device, scratch)
        self.scratch = [bucket.low for bucket in self._buckets]
        bucket_of = {name: bucket for bucket in self._buckets for name in bucket.places}
        # By the parameter itself: it may have got another name since it was hooked.
        self._summands = {
            parameter: _Summand(name, index, bucket_of[name])
            for index, (name, parameter) in enumerate(parameters.items())
        }
        self.peaks = torch.zeros(len(parameters), dtype=torch.float64, device=device)
        self._now = torch.zeros_like(self.peaks)  # those of this microbatch
        self.used: set[str] = set()
        self.sparse: set[str] = set()
        self._is_last = False

    def agree_on(self, key: int) -> None:
        """Ask all ranks whether they send the same, which `key` stands for. Collective.

        For gloo ends a process that is sent more or less than it expects.
        """
        self._keys = torch.tensor([key, -key], device=self.peaks.device)
        self._asked: Any = None
        if self._size > 1:
            self._asked = dist.all_reduce(self._keys, dist.ReduceOp.MAX, async_op=True)
        self._agreed: bool | None = None

    def agreed(self) -> bool:
        """Return whether all have the same key. Nothing is sent where they have not."""
        if self._agreed is None:
            if self._asked is not None:
                self._asked.wait()
            highest, lowest = self._keys.tolist()
            self._agreed = highest == -lowest
        return self._agreed

    def begin(self, *, last: bool) -> None:
        """Begin a microbatch."""
        self._end()
        self._is_last = last

    def add(self, parameter: nn.Parameter, weight: float) -> None:
        """Add ``weight`` times the gradient that `parameter` has got, be it one of several."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None  # noqa: S101  # PyTorch has just set it
        summand = self._summands.get(parameter)
        if summand is None:
            msg = (
                f"what is trained must not change within a step under strategy 'exact', but a "
                f"parameter of shape {tuple(parameter.shape)} got a gradient that was frozen, or "
                f"not there, when it began: call requires_grad_() before backward"
            )
            raise RuntimeError(msg)
        self.used.add(summand.name)
        if gradient.layout != torch.strided:
            self.sparse.add(summand.name)
        elif weight:
            self._count(summand)
            place, peak = summand.bucket.places[summand.name], self._now[summand.index]
            summand.bucket.open().add(gradient, weight, place, peak)
        if self._is_last:
            summand.bucket.missing.discard(summand.name)
            self._send(only_complete=True)

    def send_rest(self) -> list[bool]:
        """Send what has not been sent; say of each bucket whether something came too late for that.

        Collective, as is all that follows.
        """
        self._end()
        self._send(only_complete=False)
        return [bucket.late is not None for bucket in self._buckets]

    def receive(self, late: list[bool], large: set[str]) -> None:
        """Wait until the sums are those of all ranks.

        Args:
            late: what all ranks say of theirs.
            large: the parameters of which any has a gradient that needs high words.
        """
        for bucket, is_late in zip(self._buckets, late, strict=True):
            if bucket.work is not None:
                bucket.work.wait()
            is_large = not large.isdisjoint(bucket.places)
            if is_late:
                rest = bucket.open()
                bucket.low.add_(self._summed(rest.low))
                if is_large:
                    bucket.high.add_(rest.high)
            if is_large:
                self._summed(bucket.high)

    def set_gradients(self, used: set[str], large: set[str]) -> None:
        """Set the gradient of each parameter that is `used`; `large` as above."""
        for parameter, summand in self._summands.items():
            if summand.name in used:
                place = summand.bucket.places[summand.name]
                high = summand.bucket.high[place] if summand.name in large else None
                # In the parameter's own layout, as PyTorch's: fused optimizers insist on it.
                gradient = torch.empty_like(parameter, requires_grad=False)
                parameter.grad = _fixed_point.value(summand.bucket.low[place], high, gradient)

    def _end(self) -> None:
        """End a microbatch, if one was run."""
        self.peaks = torch.maximum(self.peaks, self._now)  # NaN if either is
        self._now.zero_()

    def _summed(self, words: Tensor) -> Tensor:
        if self._size > 1:
            dist.all_reduce(words)
        return words

    def _count(self, summand: _Summand) -> None:
        summand.count += 1
        most = _fixed_point.MOST // self._size
        if summand.count > most:
            msg = (
                f"a step must give a parameter at most {most} gradients on each of {self._size} "
                f"ranks under strategy 'exact', but `{summand.name}` got more: make "
                f"`microbatch_size` larger"
            )
            raise OverflowError(msg)

    def _send(self, *, only_complete: bool) -> None:
        # In the same order on every rank, whichever is complete first.
        for bucket in self._buckets:
            if bucket.is_sent:
                continue
            if (only_complete and bucket.missing) or not self.agreed():
                return
            bucket.is_sent = True
            if self._size > 1:
                bucket.work = dist.all_reduce(bucket.low, async_op=True)


def _empty(
    wanted: list[dict[str, slice]], device: torch.device, scratch: list[Tensor]
) -> list[Bucket]:
    """Return empty buckets with the `wanted` places, in the memory of `scratch` if that fits."""
    lengths = [max((place.stop for place in places.values()), default=0) for places in wanted]
    if [len(low) for low in scratch] != lengths or scratch[0].device != device:
        scratch = [_fixed_point.zeros(length, device) for length in lengths]
    return [Bucket(places, low) for places, low in zip(wanted, scratch, strict=True)]


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

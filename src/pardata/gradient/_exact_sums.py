"""The gradients of a step as sums in fixed point, sent in buckets while the backward still runs."""

from collections import Counter
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pardata.collective._vote import Vote
from pardata.gradient import _fixed_point
from pardata.ranks._world import world

_BUCKET = 2**20  # numbers that are sent together: 8 MiB

_Named: TypeAlias = dict[str, nn.Parameter]


class Bucket:
    """Parameters whose sums are sent together: low words as soon as all of them are complete.

    Args:
        places: where the sums of each parameter are, by its name.
        low: of shape (n,): the memory of the low words, whatever it holds.

    Attributes:
        low: the low words; of what is not in `begun` they are only set as it is sent.
        begun: the parameters to which something was added.
        missing: the parameters whose last gradient has not come.
        is_sent: whether the low words are on their way, to which nothing more can be added.
        late: the low words of what came after that.
        work: what is waited for, where there are other ranks.
    """

    def __init__(self, places: dict[str, slice], low: Tensor) -> None:
        self.places = places
        self.low = low
        self.begun = set[str]()
        self.missing = set(places)
        self.is_sent = False
        self.late: Tensor | None = None
        self.work: Any = None

    @cached_property
    def high(self) -> Tensor:
        """The high words, from the first large number on."""
        return torch.zeros_like(self.low)

    def add(self, name: str, numbers: Tensor, weight: float, peak: Tensor) -> None:
        """Add ``weight * numbers`` to the sums of a parameter, and look at them: add to `peak`.

        Args:
            name: of the parameter.
            numbers: as `_fixed_point.add` takes them.
            weight: likewise.
            peak: the sum of the largest of all that came for this parameter and has its weight in
                common, without dimensions: what those add up to is no larger.
        """
        peak += _fixed_point.largest(numbers)
        is_large = peak > _fixed_point.SMALL
        place = self.places[name]
        if self.is_sent and self.late is None:
            self.late = torch.zeros_like(self.low)
        low = self.low if self.late is None else self.late
        # A GPU is not waited for: it may write high words, of zero, that nobody asks for.
        high = self.high[place] if is_large.is_cuda or is_large else None
        is_first = self.late is None and name not in self.begun
        _fixed_point.add(numbers, weight, low[place], high, is_large, is_first=is_first)
        self.begun.add(name)

    def send(self) -> None:
        """Send the low words to all ranks, which add them up. Collective."""
        for name in self.places.keys() - self.begun:
            self.low[self.places[name]].zero_()
        self.is_sent = True
        if world().size > 1:
            self.work = dist.all_reduce(self.low, async_op=True)


class Sums:
    """Adds up the gradients of this rank's microbatches, and those of all ranks.

    Args:
        parameters: those that are trained, by name.
        device: of the parameters.
        scratch: the memory of the step before: used again where it fits, as DDP's buckets are.

    Attributes:
        buckets: of which one after the other is sent.
        peaks: of each parameter, the largest that a microbatch would add.
        counts: how many gradients each parameter has had, if any; those of weight 0 add none.
    """

    def __init__(self, parameters: _Named, device: torch.device, scratch: list[Tensor]) -> None:
        self.counts = Counter[str]()
        self.parameters = parameters
        self._size = world().size
        self.buckets = _buckets_of(parameters, device, scratch)
        self.peaks = torch.zeros(len(parameters), dtype=torch.float64, device=device)
        self._now = torch.zeros_like(self.peaks)  # those of this microbatch
        # By the parameter itself: it may have got another name since it was hooked.
        bucket_of = {name: bucket for bucket in self.buckets for name in bucket.places}
        rows = zip(parameters, parameters.values(), self._now, strict=True)
        self._places = {parameter: (name, bucket_of[name], peak) for name, parameter, peak in rows}
        self._weight = 0.0  # what has a gradient beside `add_gradients` is used and adds nothing
        self._is_last = False

    def agree_on(self, key: int) -> None:
        """Ask all ranks whether they send the same, which `key` stands for. Collective.

        For gloo ends a process that is sent more or less than it expects.
        """
        self._vote: Vote | None = Vote(world(), "backward", [key])

    @property
    def agreed(self) -> bool:
        """Whether all have the same key. Nothing is sent where they have not."""
        if self._vote is not None:
            vote, self._vote, self._agreed = self._vote, None, False  # also where it raises
            ((least, most),) = vote.result()
            self._agreed = least == most
        return self._agreed

    def add_gradients(self, loss: Tensor, weight: float, *, last: bool) -> None:
        """Run the backward of a microbatch, whose gradients come to `add` and have this weight."""
        self._weight, self._is_last = weight, last
        loss.backward()
        self._weight, self._is_last = 0.0, False
        self.peaks = torch.maximum(self.peaks, self._now)  # NaN if either is
        self._now.zero_()

    def add(self, parameter: nn.Parameter) -> None:
        """Add the gradient that `parameter` has got, be it one of several."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None  # noqa: S101  # PyTorch has just set it
        found = self._places.get(parameter)
        if found is None:
            raise RuntimeError(
                f"what is trained must not change within a step under strategy 'exact', but a "
                f"parameter of shape {tuple(parameter.shape)} got a gradient that was frozen, or "
                f"not there, when it began: call requires_grad_() before backward"
            )
        name, bucket, peak = found
        self.counts[name] += self._weight > 0
        if gradient.layout != torch.strided:
            raise TypeError(
                f"gradients must be dense under strategy 'exact', but that of `{name}` is sparse: "
                f"make the embedding with sparse=False"
            )
        if self._weight:
            if self.counts[name] > (most := _fixed_point.MOST // self._size):
                raise OverflowError(
                    f"a step must give a parameter at most {most} gradients on each of "
                    f"{self._size} ranks under strategy 'exact', but `{name}` got more: make "
                    f"`microbatch_size` larger"
                )
            bucket.add(name, gradient, self._weight, peak)
        if self._is_last:
            bucket.missing.discard(name)
            self.send()

    def send(self, *, rest: bool = False) -> None:
        """Send what is complete, or the `rest` as well. Collective, as is what follows."""
        # In the same order on every rank, whichever is complete first.
        for bucket in self.buckets:
            if bucket.is_sent:
                continue
            if (bucket.missing and not rest) or not self.agreed:
                return
            bucket.send()

    def receive(self, late: list[bool], large: set[str]) -> None:
        """Wait until the sums are those of all ranks.

        Args:
            late: what all ranks say of theirs.
            large: the parameters of which any has a gradient that needs high words.
        """
        for bucket, is_late in zip(self.buckets, late, strict=True):
            if bucket.work is not None:
                bucket.work.wait()
            if is_late:
                here = torch.zeros_like(bucket.low) if bucket.late is None else bucket.late
                bucket.low.add_(summed(here))
            if not large.isdisjoint(bucket.places):
                summed(bucket.high)

    def set_gradients(self, used: set[str], large: set[str]) -> None:
        """Set the gradient of each parameter that is `used`; `large` as above."""
        for bucket in self.buckets:
            for name, place in bucket.places.items():
                if name not in used:
                    continue
                parameter = self.parameters[name]
                # In its own layout, as PyTorch's: fused optimizers insist on it.
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
                high = bucket.high[place] if name in large else None
                _fixed_point.value(bucket.low[place], high, parameter.grad)

    def set_infinite(self, used: set[str]) -> None:
        """Set the gradient of each parameter that is `used` to what a gradient scaler looks for."""
        for name in used.intersection(self.parameters):
            parameter = self.parameters[name]
            parameter.grad = torch.full_like(parameter, torch.inf, requires_grad=False)


def summed(words: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    """Add `words` up, in place, over all ranks. Collective."""
    if world().size > 1:
        dist.all_reduce(words, operation)
    return words


def _buckets_of(parameters: _Named, device: torch.device, scratch: list[Tensor]) -> list[Bucket]:
    """Return buckets, from the last parameter to the first, as gradients come.

    In the memory of `scratch`, if that fits.
    """
    filled: list[dict[str, slice]] = []
    lengths: list[int] = []
    for name, parameter in reversed(parameters.items()):
        count = parameter.numel() * (2 if parameter.is_complex() else 1)
        if not filled or lengths[-1] + count > _BUCKET:
            filled.append({})
            lengths.append(0)
        filled[-1][name] = slice(lengths[-1], lengths[-1] + count)
        lengths[-1] += count
    if [(len(low), low.device) for low in scratch] != [(n, device) for n in lengths]:
        scratch = [torch.empty(n, dtype=torch.int64, device=device) for n in lengths]
    return [Bucket(places, low) for places, low in zip(filled, scratch, strict=True)]

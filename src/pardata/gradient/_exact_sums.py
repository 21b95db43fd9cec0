"""The gradients of a step as sums in fixed point, sent in buckets while the backward still runs."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pardata.gradient import _fixed_point

_BUCKET = 2**20  # numbers that are sent together: 8 MiB


class Bucket(_fixed_point.Words):
    """Parameters whose sums are sent together: low words as soon as all of them are complete.

    Attributes:
        missing: the parameters whose last gradient has not come.
        is_sent: whether the low words are on their way, to which nothing more can be added.
        late: the words of what came after that.
        work: what is waited for, where there are other ranks.
    """

    def __init__(self, places: dict[str, slice], low: Tensor) -> None:
        super().__init__(places, low)
        self.missing = set(places)
        self.is_sent = False
        self.late: _fixed_point.Words | None = None
        self.work: Any = None

    def open(self) -> _fixed_point.Words:
        """Return the words to which more can be added."""
        if not self.is_sent:
            return self
        if self.late is None:
            self.late = _fixed_point.Words(self.places, torch.empty_like(self.low))
        return self.late


@dataclass(eq=False)
class _Summand:
    """A parameter: where its sum is, and how many gradients are in it."""

    name: str
    bucket: Bucket
    peak: Tensor  # of what comes in a microbatch
    count: int = 0


class Sums:
    """Adds up the gradients of this rank's microbatches, and those of all ranks.

    Args:
        parameters: those that are trained, by name.
        size: how many ranks there are.
        device: of the parameters.
        scratch: the memory of the step before: used again where it fits, as DDP's buckets are.

    Attributes:
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
        self.used: set[str] = set()
        self.sparse: set[str] = set()
        self.parameters = parameters
        self._size = size
        self._buckets = _empty_buckets(parameters, device, scratch)
        self.peaks = torch.zeros(len(parameters), dtype=torch.float64, device=device)
        self._now = torch.zeros_like(self.peaks)  # those of this microbatch
        # By the parameter itself: it may have got another name since it was hooked.
        bucket_of = {name: bucket for bucket in self._buckets for name in bucket.places}
        self._summands = {
            parameter: _Summand(name, bucket_of[name], peak)
            for (name, parameter), peak in zip(parameters.items(), self._now, strict=True)
        }
        self._weight = 0.0  # what has a gradient beside `add_gradients` is used and adds nothing
        self._is_last = False

    @property
    def late(self) -> list[bool]:
        """Say of each bucket whether something came when it had been sent."""
        return [bucket.late is not None for bucket in self._buckets]

    @property
    def scratch(self) -> list[Tensor]:
        """Return the memory of this step, for the next."""
        return [bucket.low for bucket in self._buckets]

    def agree_on(self, key: int) -> None:
        """Ask all ranks whether they send the same, which `key` stands for. Collective.

        For gloo ends a process that is sent more or less than it expects.
        """
        self._keys = torch.tensor([key, -key], device=self._now.device)
        self._asked: Any = None
        if self._size > 1:
            self._asked = dist.all_reduce(self._keys, dist.ReduceOp.MAX, async_op=True)

    @cached_property
    def agreed(self) -> bool:
        """Whether all have the same key. Nothing is sent where they have not."""
        if self._asked is not None:
            self._asked.wait()
        highest, lowest = self._keys.tolist()
        return bool(highest == -lowest)

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
        elif self._weight:
            self._count(summand)
            summand.bucket.open().add(summand.name, gradient, self._weight, summand.peak)
        if self._is_last:
            summand.bucket.missing.discard(summand.name)
            self.send()

    def send(self, *, rest: bool = False) -> None:
        """Send what is complete, or the `rest` as well. Collective, as is what follows."""
        # In the same order on every rank, whichever is complete first.
        for bucket in self._buckets:
            if bucket.is_sent:
                continue
            if (bucket.missing and not rest) or not self.agreed:
                return
            bucket.is_sent = True
            if self._size > 1:
                bucket.work = dist.all_reduce(bucket.low, async_op=True)

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
        for bucket in self._buckets:
            named = {name: self.parameters[name] for name in bucket.places if name in used}
            for parameter in named.values():
                # In its own layout, as PyTorch's: fused optimizers insist on it.
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
            bucket.write({name: p.grad for name, p in named.items() if p.grad is not None}, large)

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


def _empty_buckets(
    parameters: dict[str, nn.Parameter], device: torch.device, scratch: list[Tensor]
) -> list[Bucket]:
    """Return buckets, from the last parameter to the first, as gradients come.

    In the memory of `scratch`, if that fits.
    """
    filled: list[dict[str, slice]] = [{}]
    lengths = [0]
    for name, parameter in reversed(parameters.items()):
        count = parameter.numel() * (2 if parameter.is_complex() else 1)
        if filled[-1] and lengths[-1] + count > _BUCKET:
            filled.append({})
            lengths.append(0)
        filled[-1][name] = slice(lengths[-1], lengths[-1] + count)
        lengths[-1] += count
    if [len(low) for low in scratch] != lengths or scratch[0].device != device:
        scratch = [torch.empty(n, dtype=torch.int64, device=device) for n in lengths]
    return [Bucket(places, low) for places, low in zip(filled, scratch, strict=True)]

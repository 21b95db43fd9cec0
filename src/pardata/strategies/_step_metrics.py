"""Loss and metrics of a step: collected by microbatch, summed over the ranks, divided by counts."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pardata._pytree import KeyPath, keystr, leaves_with_path, map_with_path
from pardata.collectives._all_reduce import cast_like, shape_text, unflatten_like, weighted_numbers
from pardata.collectives._fingerprint import Leaf, fingerprint_slots, fingerprints_match, number_of
from pardata.data._batch import iter_tensors, num_samples
from pardata.environment._device import widest_float_dtype, without_wait
from pardata.environment._world import world
from pardata.model._replica_state import ReplicaState
from pardata.strategies._forward import scalar_loss, upcast
from pardata.strategies._loss_weights import positive
from pardata.strategies._step_record import record_of

# Layout of the message, of shape (26,): the count, 3 hashes, their squares, 19 weighted sums.
_HASHES = 3
_FRONT = 1 + 2 * _HASHES
_VALUES = 19
_MOST = 10_000  # elements of a metric that is reduced in each step; statistics may have more


@dataclass(frozen=True)
class Mean:
    """A metric with a denominator: ``Mean(total, count)``, for `backward`.

    `backward` returns the sum of the totals over the sum of the counts, of all microbatches and
    ranks. It is NaN where nothing counts. The accuracy of a class is
    ``Mean((hits & is_class).sum(), is_class.sum())``. Microbatches that count 0 for the loss are
    left out. In type annotations metrics that hold one are ``Any``.

    Args:
        total: a number, or a tensor of any shape.
        count: what the total is a sum over: one number, or a tensor of the shape of `total`.

    Raises:
        TypeError: one of the two is no number and no dense tensor of real numbers.
        ValueError: the count has another shape.

    >>> import torch
    >>> from pardata import backward
    >>> net, x = torch.nn.Linear(1, 1), torch.tensor([[1.0], [2.0], [-1.0]])
    >>> def loss_fn(model, x):
    ...     return model(x).square().mean(), Mean(x[x > 0].sum(), (x > 0).sum())
    >>> backward(net, loss_fn, x)[1]
    tensor(1.5000)
    """

    total: Tensor | float
    count: Tensor | float

    def __post_init__(self) -> None:
        number_of(self.total, (), "total")
        number_of(self.count, (), "count")
        of_total, of_count = (tuple(getattr(n, "shape", ())) for n in (self.total, self.count))
        if of_count not in ((), of_total):
            raise ValueError(
                f"`count` must be a number or have the shape of `total`, {of_total}, not {of_count}"
            )


class StepMetrics:
    """The losses and metrics of this rank's microbatches, and their means over all ranks.

    Args:
        layer: the layer that belongs to the model's strategy.

    Attributes:
        structures: the last structures in steps of the model, which are not checked again.
        step: the step and its loader, as a text that ranks compare; "" if unknown.
        count: the count of this rank's microbatches.
        total: the count of all ranks' microbatches; a tensor on a GPU.
        replica: the state of this replica, if there are several.
        errors: errors of this rank, kept until all ranks know of them.
    """

    step: str = ""
    total: float | Tensor
    replica: ReplicaState
    _text: str | None = None  # the structure of the metrics
    _metrics: Any = None
    _paths: tuple[KeyPath, ...] = ()
    _means: list[Tensor] | None = None  # the means of the loss, and of the leaves of metrics

    def __init__(self, layer: nn.Module) -> None:
        self.structures = record_of(layer).structures
        self.errors: list[Exception] = []
        self._seen: list[tuple[list[Leaf], float]] = []
        # Number of leaves weighted like the loss; totals and counts of each `Mean` follow.
        self._weighted = 1
        self.count: float = 0

    def add(self, returned: Any, count: float, microbatch: Any) -> Tensor:
        """Add the result of `loss_fn` for a microbatch, and return the loss."""
        has_metrics = type(returned) is tuple and len(returned) == 2
        loss = scalar_loss(returned[0] if has_metrics else returned)
        leaves: list[Leaf] = [loss.detach()]
        if has_metrics:
            leaves += self._leaves(returned[1], microbatch)
        elif self._text:
            leaves += self._refuse(ValueError(_UNLIKE))
        self._text = self._text or ""
        self._seen.append((leaves, count))
        self.count += count
        return loss

    def _leaves(self, metrics: Any, microbatch: Any) -> list[Leaf]:
        """Return the leaves of `metrics`, whose structure must be that of earlier microbatches."""
        try:
            plain, means = _numbers_of(metrics)
            text = _structure(plain, means)
            if text not in self.structures:
                _check_means(plain, microbatch)
                self.structures = (*self.structures, text)[-8:]
        except TypeError as error:
            return self._refuse(error)
        if self._text not in (None, text):
            return self._refuse(ValueError(_UNLIKE))
        self._text, self._metrics, self._paths = text, metrics, (*plain, *means)
        self._weighted = 1 + len(plain)
        leaves = [*plain.values(), *(part for m in means.values() for part in (m.total, m.count))]
        return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def _refuse(self, error: Exception) -> list[Leaf]:
        """Keep an error until all ranks know of it, and return the first microbatch's leaves."""
        self.errors.append(error)
        return self._first()[1:] if self._seen else []

    def raise_refused(self) -> None:
        """Raise the first kept error, and drop it: its traceback holds the tensors of the step."""
        if self.errors:
            raise self.errors.pop(0)

    def message(self, size: int) -> Tensor:
        """Return this rank's message, a vector of shape (26,), for an all-reduce over `size` ranks.

        Collective on a GPU if further sums have a new structure: hashes are compared only later.
        """
        text, replica = f"{self.step} {self.structure()} {self.replica.text()}", self.replica
        front = [self.count, *fingerprint_slots(text, size)]
        sums = self._sums(self._seen, front)
        self._rest = sums[_FRONT + _VALUES :]
        rest = self.structure() if len(self._rest) else ""
        if not sums.is_cpu and replica.structure != rest and size == world().size:
            replica.compare("backward", self.facts)
            replica.structure = rest
        return sums[: _FRONT + _VALUES]

    def receive(self, sums: Tensor, group: Any) -> None:
        """Set the means from the sums of all messages, of shape (26,). Collective.

        Raises:
            RuntimeError, ValueError: steps, structures or replicas differ, or the count is 0. On a
                GPU the means are NaN instead, because the host does not wait.
        """
        if not sums.is_cpu:
            self.total = sums[0]
            hashes, squares = sums[1:_FRONT].view(2, -1)
            differ = torch.addcmul(squares, hashes, hashes, value=-1).any()
            sums[_FRONT:].masked_fill_(differ, torch.nan)
        else:
            count, *seen = sums[:_FRONT].tolist()
            if not fingerprints_match(seen):
                self.replica.raise_difference("backward", self.facts)
            self.total = positive(count)
        values = sums[_FRONT:]
        if len(self._rest):
            dist.all_reduce(self._rest, group=group)
            values = torch.cat([values, self._rest])
        self.set_means(values, self.total)

    def spoil(self, differ: Tensor | None) -> None:
        """Make the means NaN on a device where `differ` is true, for which the host cannot wait."""
        if differ is not None and self._means is not None:
            self._means = [mean.masked_fill(differ, torch.nan) for mean in self._means]

    def set_means(self, sums: Tensor, total: float | Tensor) -> None:
        """Set the means from the sums over all ranks; `total` is the count of the loss."""
        parts = unflatten_like(sums, self._first())
        self._means = [part / total for part in parts[: self._weighted]] + parts[self._weighted :]

    def result(self) -> Any:
        """Return the mean loss, and the means of the metrics if there are any."""
        local_loss, *leaves = self._first()
        # The values of one microbatch in one process are the means, unless a `Mean` is among them.
        if self._means is None and (len(self._seen) > 1 or len(leaves) >= self._weighted):
            self.set_means(self._sums(self._seen), self.count)
        loss, *metrics = self._means or self._first()
        loss = upcast(local_loss) if loss is local_loss else loss.to(upcast(local_loss))
        if not self._text:
            return loss
        first = self._weighted - 1
        values = list(map(cast_like, leaves[:first], metrics[:first]))
        means = zip(metrics[first::2], metrics[first + 1 :: 2], strict=True)
        values += map(cast_like, leaves[first::2], [total / count for total, count in means])
        found = dict(zip(self._paths, values, strict=True))
        return loss, map_with_path(self._metrics, lambda path, _: found[path])

    def _first(self) -> list[Any]:
        """Return the loss and metrics of this rank's first microbatch."""
        return self._seen[0][0]

    def last(self) -> Tensor:
        """Return the weighted values of the last microbatch in one vector."""
        return self._sums(self._seen[-1:])

    def _sums(self, seen: list[tuple[list[Leaf], float]], front: Sequence[float] = ()) -> Tensor:
        """Return the weighted sums of loss and metrics in a vector, after the `front` of a message.

        On a GPU it takes one copy, and one kernel for each leaf, because launches are slow.
        """
        weighted = [
            (v, [c] * self._weighted + [1] * len(v)) for v, c in seen if c
        ]  # 0 * NaN is NaN
        rows = [weighted_numbers(leaves, weights) for leaves, weights in weighted]
        first, sums = self._first(), list(front)
        near = rows if None not in rows and first[0].is_cpu else []
        sums += map(sum, zip(*near, strict=True))
        numbers = sum(leaf.numel() if isinstance(leaf, Tensor) else 1 for leaf in first)
        sums += [0.0] * (len(front) + max(numbers, _VALUES if front else 0) - len(sums))
        device, dtype = first[0].device, widest_float_dtype(first[0].device)
        if front and dtype != torch.float64:  # hashes need it
            device, dtype = torch.device("cpu"), torch.float64
        vector = without_wait(torch.tensor(sums, dtype=dtype, device="cpu"), device)
        for leaves, weights in [] if near else weighted:
            parts = unflatten_like(vector[len(front) :], leaves)
            for part, leaf, weight in zip(parts, leaves, weights, strict=False):
                part.add_(_addend(leaf, vector), alpha=weight)
        return vector

    def structure(self) -> str:
        """Return a text of the metrics' structure, which differs on a rank with an error."""
        return f"refused on rank {world().rank}" if self.errors else self._text or ""

    def facts(self) -> dict[str, object]:
        """Return the step and the structure of metrics; raise a kept error."""
        self.raise_refused()
        return {"step": self.step, "metrics": self._text or "none"}


def _addend(leaf: Leaf, sums: Tensor) -> Any:
    """Return a leaf of metrics as a float, or a tensor on the device of `sums`."""
    if not isinstance(leaf, Tensor):
        return float(leaf)
    is_local = leaf.device == sums.device and leaf.dtype.itemsize > 1  # `add_` takes no float8
    leaf = leaf if leaf.is_cpu else leaf.to(sums.device)  # before float64, which it may lack
    return leaf if is_local else without_wait(leaf.to(sums.dtype), sums.device)


_UNLIKE = "`loss_fn` must return metrics of the same structure for each microbatch, but did not"


def _numbers_of(metrics: Any) -> tuple[dict[KeyPath, Leaf], dict[KeyPath, Mean]]:
    """Return the numbers and each `Mean` in `metrics`, by path, in the same order on every rank."""
    plain: dict[KeyPath, Leaf] = {}
    means: dict[KeyPath, Mean] = {}
    for path, leaf in leaves_with_path(metrics, by_text=True):
        if isinstance(leaf, Mean):
            total, count = (number_of(part, path, "metrics") for part in (leaf.total, leaf.count))
            means[path] = Mean(total, count)
        else:
            plain[path] = number_of(leaf, path, "metrics")
    return plain, means


def _structure(plain: Mapping[KeyPath, Leaf], means: Mapping[KeyPath, Mean]) -> str:
    """Return a text of the structure of metrics."""
    texts = {path: shape_text(leaf) for path, leaf in plain.items()}
    for path, mean in means.items():
        texts[path] = f"the mean of {shape_text(mean.total)} over {shape_text(mean.count)}"
    return "; ".join(["metrics", *(f"{keystr('metrics', path)}: {texts[path]}" for path in texts)])


def _check_means(found: Mapping[KeyPath, Leaf], microbatch: Any) -> None:
    """Raise for a metric with a row for each sample, which is no mean, or of many elements.

    A structure that has occurred with another number of samples is not checked again.
    """
    rows = {len(tensor) for tensor in iter_tensors(microbatch) if tensor.ndim}
    with suppress(TypeError):  # the number of samples is unclear
        rows.add(num_samples(microbatch))
    for path, leaf in found.items():
        shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else ()
        has_rows = shape != (1,) and shape[:1] in {(number,) for number in rows}
        if has_rows or math.prod(shape) > _MOST:
            msg = f"`{keystr('metrics', path)}` must be a mean over the microbatch, of at most "
            msg += f"{_MOST} elements, but its shape is {shape}: return its mean, or keep it and "
            msg += "call all_gather after backward; if rows are classes, return Mean(total, count)"
            raise TypeError(msg)

"""The loss and the metrics of a step: those of each microbatch, their sums and means."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pardata._pytree import KeyPath, keystr, leaves_with_path, map_with_path
from pardata.collectives._all_reduce import like, shape_text, split_like
from pardata.collectives._fingerprint import Leaf, fingerprint_slots, fingerprints_match, number_of
from pardata.data._batch_parts import tensors_of
from pardata.data._sample_count import samples_of
from pardata.environment._device import widest_float_dtype, without_wait
from pardata.environment._world import store_client, world
from pardata.store._round import exchange, raise_if_different
from pardata.strategies._forward import checked, wide
from pardata.strategies._loss_weights import positive

# The places of a message: what was counted, hashes and their squares, then the first values.
_HASHES = 3
_FRONT = 1 + 2 * _HASHES
_ROOM = 19
# The structure of the metrics that a model's ranks have compared, where they had no place.
_compared = WeakKeyDictionary[nn.Module, str]()


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
                f"`count` must be one number, or have the shape of `total`, {of_total}, but has "
                f"the shape {of_count}: return a mean for each count"
            )


class StepMetrics:
    """The losses and metrics of this rank's microbatches, and their means over those of all ranks.

    Args:
        known: the structures that metrics may have: those of earlier steps of the model.

    Attributes:
        step: which step this is, where a loader or the user has said so: the same on all ranks.
        count: what the microbatches here count.
        total: what those of all ranks count; a tensor where to read it would stop a GPU.
    """

    step: str = ""
    total: float | Tensor
    _text: str | None = None  # the structure of what `loss_fn` returns
    _metrics: Any = None
    _paths: tuple[KeyPath, ...] = ()
    _error: Exception | None = None
    _means: list[Tensor] | None = None  # those of the loss, and of the leaves of metrics

    def __init__(self, known: set[str]) -> None:
        self._known = known
        self._seen: list[tuple[list[Leaf], float]] = []
        self._weighted = 1  # leaves in front that count as the loss; totals and counts follow
        self.count: float = 0

    def add(self, returned: Any, count: float, microbatch: Any) -> Tensor:
        """Take down what `loss_fn` has returned for a microbatch, and return the loss."""
        has_metrics = type(returned) is tuple and len(returned) == 2
        loss = checked(returned[0] if has_metrics else returned)
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
        """Return the leaves of `metrics`, of the same structure as those that came before."""
        try:
            plain, means = _numbers_of(metrics)
            text = _structure(plain, means)
            if text not in self._known:
                _check_means(plain, microbatch)
        except TypeError as error:
            return self._refuse(error)
        if self._text not in (None, text):
            return self._refuse(ValueError(_UNLIKE))
        self._known.add(text)
        self._text, self._metrics, self._paths = text, metrics, (*plain, *means)
        self._weighted = 1 + len(plain)
        leaves = [*plain.values(), *(part for m in means.values() for part in (m.total, m.count))]
        return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def _refuse(self, error: Exception) -> list[Leaf]:
        """Keep an error that is raised as soon as all ranks know; until then tell as before."""
        self._error = self._error or error
        return self._first()[1:] if self._seen else []

    def raise_refused(self) -> None:
        """Raise what was refused, on a rank that trains alone."""
        if self._error is not None:
            raise self._error

    def message(self, size: int, layer: nn.Module) -> Tensor:
        """Return the sums here, in a vector whose length is the same on each of `size` ranks.

        Collective on a GPU, if what has no place in it was not yet compared for this model. No rank
        knows of the others' hashes before the vector is sent.
        """
        front = [self.count, *fingerprint_slots(f"{self.step} {self.structure()}", size)]
        sums = self._sums(self._seen, front)
        self._rest = sums[_FRONT + _ROOM :]
        rest = self.structure() if len(self._rest) else ""
        if not sums.is_cpu and _compared.get(layer) != rest and size == world().size:
            self.raise_of_structures()
            _compared[layer] = rest
        return sums[: _FRONT + _ROOM]

    def receive(self, sums: Tensor, group: Any) -> None:
        """Take the means from the sums of the messages of all ranks. Collective.

        Raises:
            RuntimeError, ValueError: where steps or structures differ, and where nothing was
                counted; on a GPU, which nobody waits for, means are NaN instead.
        """
        if not sums.is_cpu:
            self.total = sums[0]
            hashes, squares = sums[1:_FRONT].view(2, -1)
            differ = torch.addcmul(squares, hashes, hashes, value=-1).any()
            sums[_FRONT:].masked_fill_(differ, torch.nan)
        else:
            count, *seen = sums[:_FRONT].tolist()
            if not fingerprints_match(seen):
                self.raise_of_structures()
            self.total = positive(count)
        values = sums[_FRONT:]
        if len(self._rest):
            dist.all_reduce(self._rest, group=group)
            values = torch.cat([values, self._rest])
        self.set_means(values, self.total)

    def set_means(self, sums: Tensor, total: float | Tensor) -> None:
        """Take the means over the microbatches of all ranks, whose loss counts `total`."""
        parts = split_like(sums, self._first())
        self._means = [part / total for part in parts[: self._weighted]] + parts[self._weighted :]

    def result(self) -> Any:
        """Return the mean loss, and the means of the metrics, if there are any."""
        own, *leaves = self._first()
        # One microbatch that nobody shares has its own means, except totals over counts.
        if self._means is None and (len(self._seen) > 1 or len(leaves) >= self._weighted):
            self.set_means(self._sums(self._seen), self.count)
        loss, *metrics = self._means or self._first()
        loss = wide(own) if loss is own else loss.to(wide(own))
        if not self._text:
            return loss
        first = self._weighted - 1
        values = list(map(like, leaves[:first], metrics[:first]))
        for leaf, total, count in zip(
            leaves[first::2], metrics[first::2], metrics[first + 1 :: 2], strict=True
        ):
            values.append(like(leaf, total / count))
        found = dict(zip(self._paths, values, strict=True))
        return loss, map_with_path(self._metrics, lambda path, _: found[path])

    def _first(self) -> list[Any]:
        """Return loss and metrics of the first microbatch here."""
        return self._seen[0][0]

    def last(self) -> Tensor:
        """Return the sums of the microbatch that was run last alone."""
        return self._sums(self._seen[-1:])

    def _sums(self, seen: list[tuple[list[Leaf], float]], front: Sequence[float] = ()) -> Tensor:
        """Return the sums of loss and metrics, each times what it counts; a message has a `front`.

        A GPU gets one copy and one kernel for each leaf: of small models it waits for launches.
        """
        first = self._first()
        numbers = sum(leaf.numel() if isinstance(leaf, Tensor) else 1 for leaf in first)
        dtype = torch.float64 if front else widest_float_dtype(first[0].device)
        host = torch.tensor(front, dtype=dtype, device="cpu")
        host = nn.functional.pad(host, (0, max(numbers, _ROOM if front else 0)))
        sums = without_wait(host, first[0].device)
        for leaves, count in seen:
            if count:  # 0 times NaN is NaN: what does not count is left out
                weights = [count] * self._weighted + [1] * len(leaves)
                parts = split_like(sums[len(front) :], leaves)
                for part, leaf, weight in zip(parts, leaves, weights, strict=False):
                    part.add_(_addend(leaf, sums), alpha=weight)
        return sums

    def structure(self) -> str:
        """Return a text that is the same on ranks which have the same metrics."""
        return self._text or "" if self._error is None else f"refused on rank {world().rank}"

    def raise_of_structures(self) -> None:
        """Raise on every rank, each having seen that not all have sent the same. Collective."""

        def facts() -> dict[str, object]:
            if self._error is not None:
                raise self._error
            return {"step": self.step, "metrics": self._text or "none"}

        cure = (
            "Call `backward` for each step of one loader, and let `loss_fn` return the same "
            "structure, on every rank."
        )
        differ = partial(raise_if_different, "backward", cure=cure)
        exchange(store_client(), "backward", facts, differ)


def _addend(leaf: Leaf, sums: Tensor) -> Any:
    """Return a leaf of metrics as it can be added to `sums`."""
    if not isinstance(leaf, Tensor):
        return float(leaf)
    there = leaf.device == sums.device
    return leaf if there else without_wait(leaf.to(sums.dtype), sums.device)


_UNLIKE = (
    "`loss_fn` must return metrics of the same structure for each microbatch, but did not: let it "
    "not depend on the microbatch"
)


def _numbers_of(metrics: Any) -> tuple[dict[KeyPath, Leaf], dict[KeyPath, Mean]]:
    """Return the numbers in `metrics`, and the means, by paths in the same order on every rank."""
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
    """Return a text that is the same for metrics of the same structure."""
    texts = {path: shape_text(leaf) for path, leaf in plain.items()}
    for path, mean in means.items():
        texts[path] = f"the mean of {shape_text(mean.total)} over {shape_text(mean.count)}"
    return "; ".join(["metrics", *(f"{keystr('metrics', path)}: {texts[path]}" for path in texts)])


def _check_means(found: Mapping[KeyPath, Leaf], microbatch: Any) -> None:
    """Refuse a metric that has a row for each sample: it is no mean.

    Once another number of samples has shown that a metric is none, its structure is known.
    """
    rows = {len(tensor) for tensor in tensors_of(microbatch) if tensor.ndim}
    with suppress(TypeError):  # a batch that does not tell
        rows.add(samples_of(microbatch))
    for path, leaf in found.items():
        shape = leaf.shape if isinstance(leaf, Tensor) else ()
        if shape and shape[0] in rows and tuple(shape) != (1,):
            raise TypeError(
                f"`{keystr('metrics', path)}` must be a mean over the microbatch, but its "
                f"shape is {tuple(shape)}, a row for each of {shape[0]} samples: return its mean, "
                f"or keep it and call all_gather after backward; pass list(metric) if its rows are "
                f"no samples"
            )

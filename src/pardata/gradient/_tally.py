"""The loss and the metrics of a step: what each microbatch says of them, their sums and means."""

import hashlib
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pardata.collective._agreement import agree, require_same
from pardata.collective._header import Leaf, Values, numbers_of
from pardata.collective._tree import Path, in_brackets, mapped
from pardata.gradient._count import positive
from pardata.ranks._world import world

# The places of what is told: what was counted, hashes and their squares, then the first values.
_HASHES = 6
_FRONT = 1 + 2 * _HASHES
_ROOM = 19


class Tally:
    """The losses and metrics of this rank's microbatches, and their means over those of all ranks.

    Attributes:
        count: what the microbatches here count.
        total: what those of all ranks count; a tensor where to read it would stop a GPU.
    """

    total: float | Tensor
    _text: str | None = None  # the structure of what `loss_fn` returns
    _metrics: Any = None
    _paths: tuple[Path, ...] = ()
    _error: Exception | None = None
    _means: list[Any] | None = None  # of the loss, and of the leaves of metrics

    def __init__(self) -> None:
        self._seen: list[tuple[list[Leaf], int]] = []
        self.count = 0

    def add(self, returned: Any, count: int) -> Tensor:
        """Take down what `loss_fn` has returned for a microbatch, and return the loss."""
        has_metrics = type(returned) is tuple and len(returned) == 2
        loss = _checked(returned[0] if has_metrics else returned)
        leaves: list[Leaf] = [loss.detach()]
        if has_metrics:
            leaves += self._leaves(returned[1])
        elif self._text:
            self._refuse(ValueError(_UNLIKE))
        self._text = self._text or ""
        self._seen.append((leaves, count))
        self.count += count
        return loss

    def _leaves(self, metrics: Any) -> list[Leaf]:
        """Return the leaves of `metrics`, of the same structure as those that came before."""
        try:
            found = numbers_of(metrics, "metrics")
        except TypeError as error:
            return self._refuse(error)
        described = (f"{in_brackets('metrics', path)}: {_shape(found[path])}" for path in found)
        text = "; ".join(["metrics", *described])
        if self._text not in (None, text):
            return self._refuse(ValueError(_UNLIKE))
        self._text, self._metrics, self._paths = text, metrics, tuple(found)
        return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in found.values()]

    def _refuse(self, error: Exception) -> list[Leaf]:
        """Keep an error that is raised as soon as all ranks know; nothing is told of these."""
        self._error = self._error or error
        return []

    def told(self, size: int) -> Tensor:
        """Return the sums here, in a vector whose length is the same on each of `size` ranks."""
        values = self.sums()
        self._rest = values[_ROOM:]
        hashes = _hashes(self.structure(), size)
        front = [float(self.count), *hashes, *(number * number for number in hashes)]
        padding = [0.0] * (_ROOM - len(values))
        if isinstance(values, list):
            return torch.tensor(front + values[:_ROOM] + padding, dtype=torch.float64)
        ends = torch.tensor(front + padding, dtype=torch.float64)
        if values.is_cuda:
            ends = ends.pin_memory().to(values.device, non_blocking=True)
        return torch.cat([ends[:_FRONT], values[:_ROOM], ends[_FRONT:]])

    def hear(self, told: Tensor, size: int, group: Any) -> None:
        """Take the means from the sums of what all ranks have told. Collective.

        Raises:
            RuntimeError, ValueError: where the structures differ, and where nothing was counted; on
                a GPU, which nobody waits for, means are NaN instead.
        """
        if told.is_cuda:
            told = told.double()
            hashes, squares = told[1:_FRONT].view(2, -1)
            self.total = told[0]
            told = torch.where((size * squares == hashes.square()).all(), told, torch.nan)
            values: Values = told[_FRONT:]
        else:
            count, *numbers = told.tolist()
            for hashed, square in zip(numbers[:_HASHES], numbers[_HASHES:], strict=False):
                if size * square != hashed * hashed:
                    self.raise_of_structures()
            self.total = positive(int(count))
            values = numbers[_FRONT - 1 :]
        if len(self._rest):
            rest = torch.as_tensor(self._rest, dtype=torch.float64)
            dist.all_reduce(rest, group=group)
            values = torch.cat([torch.as_tensor(values, dtype=torch.float64).to(rest), rest])
        self.settle(values, self.total)

    def settle(self, sums: Values, total: float | Tensor) -> None:
        """Take the means of the microbatches of all ranks: `sums`, of what counts `total`."""
        if isinstance(sums, list) and all(map(_is_number, self._first())):
            self._means = [number / total for number, _ in zip(sums, self._first(), strict=False)]
            return
        means = torch.as_tensor(sums, dtype=torch.float64) / total
        sizes = [leaf.numel() if isinstance(leaf, Tensor) else 1 for leaf in self._first()]
        self._means = list(means[: sum(sizes)].split(sizes))

    def result(self) -> Any:
        """Return the mean loss, and the means of the metrics, if there are any."""
        if self._means is None:  # nobody else runs any
            if self._error is not None:
                raise self._error
            if len(self._seen) > 1:
                self.settle(self.sums(), self.count)
        own, *leaves = self._first()
        loss, *metrics = self._means or self._first()
        wide = own if own.dtype in (torch.float32, torch.float64) else own.float()
        if loss is not wide:
            loss = loss.to(wide).reshape(()) if isinstance(loss, Tensor) else wide.new_tensor(loss)
        if not self._text:
            return loss
        found = dict(zip(self._paths, map(_like, leaves, metrics), strict=True))
        return loss, mapped(self._metrics, lambda path, _: found[path])

    def _first(self) -> list[Any]:
        """Return loss and metrics of the first microbatch here."""
        return self._seen[0][0]

    def rows(self) -> list[tuple[Tensor, int]]:
        """Return, of each microbatch here, loss and metrics in one vector, and what it counts."""
        if self._error is not None:
            return []
        return [(torch.cat(list(map(self._flat, leaves))), count) for leaves, count in self._seen]

    def sums(self) -> Values:
        """Return the sums here of loss and metrics, each times what it counts."""
        # 0 times NaN is NaN: what does not count is left out.
        if self._error is not None:
            return [0.0]
        if all(map(_is_number, self._first())):
            zeros = [0.0] * len(self._first())
            scaled = [[float(leaf) * n for leaf in leaves] for leaves, n in self._seen if n]
            return [sum(column) for column in zip(zeros, *scaled, strict=True)]
        rows = self.rows()
        return sum((row * count for row, count in rows if count), torch.zeros_like(rows[0][0]))

    def _flat(self, leaf: Leaf) -> Tensor:
        device = self._first()[0].device
        if isinstance(leaf, Tensor):
            return leaf.detach().to(device, torch.float64).reshape(-1)
        return torch.full((1,), leaf, dtype=torch.float64, device=device)

    def structure(self) -> str:
        """Return a text that is the same on ranks which have the same metrics."""
        return self._text or "" if self._error is None else f"refused on rank {world().rank}"

    def raise_of_structures(self) -> None:
        """Raise on every rank, each having seen that not all have told the same. Collective."""

        def facts() -> dict[str, object]:
            if self._error is not None:
                raise self._error
            return {"metrics": self._text or "none"}

        cure = "Let `loss_fn` return the same structure on every rank."
        agree(world(), "backward", facts, lambda told: require_same("backward", told, cure))


_UNLIKE = (
    "`loss_fn` must return metrics of the same structure for each microbatch, but did not: let it "
    "not depend on the microbatch"
)


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"`loss_fn` must return a tensor of one element, but returned a {type(loss).__name__}: "
            f"take the mean over the samples, and return it, or it and metrics: (loss, metrics)"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"`loss_fn` must return a tensor of one element, but returned one of shape "
            f"{tuple(loss.shape)}: take the mean over the samples"
        )
    return loss.reshape(()) if loss.ndim else loss


def _shape(leaf: Leaf) -> str:
    # A number and a tensor without dimensions are the same, and so are all dtypes.
    return "x".join(map(str, leaf.shape)) if isinstance(leaf, Tensor) and leaf.ndim else "number"


def _is_number(leaf: Leaf) -> bool:
    """Whether `leaf` is one number that can be read without waiting for a GPU."""
    return not isinstance(leaf, Tensor) or (leaf.ndim == 0 and not leaf.is_cuda)


def _like(leaf: Leaf, mean: Leaf) -> Leaf:
    """Return `mean` as the kind of number that `leaf` is."""
    if not isinstance(leaf, Tensor):
        return float(mean)
    dtype = leaf.dtype if leaf.is_floating_point() else torch.get_default_dtype()
    if not isinstance(mean, Tensor):
        return torch.tensor(mean, dtype=dtype, device=leaf.device)
    return mean.detach().to(leaf.device, dtype, copy=True).view(leaf.shape)


@lru_cache(maxsize=64)
def _hashes(text: str, size: int) -> list[int]:
    """Hash into numbers so small that float32 adds the squares of all ranks' without rounding.

    As in `collective._header`: by Cauchy and Schwarz, `size` times the sum of squares is the square
    of the sum exactly if all ranks have the same.
    """
    bits = (24 - (size - 1).bit_length()) // 2
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    return [digest >> bits * number & (2**bits - 1) for number in range(_HASHES)]

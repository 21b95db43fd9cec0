"""The loss and the metrics of a step: what each microbatch says of them, their sums and means."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pardata.collective._agreement import agree, require_same
from pardata.collective._header import Leaf, hashes, numbers_of
from pardata.collective._reduction import like, shape_text, split_like
from pardata.collective._tree import TreePath, in_brackets, mapped
from pardata.gradient._count import positive
from pardata.ranks._arguments import kind_of
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
    _paths: tuple[TreePath, ...] = ()
    _error: Exception | None = None
    _means: list[Tensor] | None = None  # of the loss, and of the leaves of metrics

    def __init__(self) -> None:
        self._seen: list[tuple[list[Leaf], int]] = []
        self.count = 0

    def add(self, returned: Any, count: int) -> Tensor:
        """Take down what `loss_fn` has returned for a microbatch, and return the loss."""
        has_metrics = type(returned) is tuple and len(returned) == 2
        loss = checked(returned[0] if has_metrics else returned)
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
        described = (f"{in_brackets('metrics', path)}: {shape_text(found[path])}" for path in found)
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
        # In float32, whose mantissa has 24 bits.
        front = [self.count, *hashes(self.structure(), size, _HASHES, 24)]
        ends = torch.tensor(front + [0] * (_ROOM - len(values)), dtype=torch.float64)
        if values.is_cuda:
            ends = ends.pin_memory().to(values.device, non_blocking=True)
        return torch.cat([ends[:_FRONT], values[:_ROOM], ends[_FRONT:]])

    def hear(self, told: Tensor, size: int, group: Any) -> None:
        """Take the means from the sums of what all ranks have told. Collective.

        Raises:
            RuntimeError, ValueError: where the structures differ, and where nothing was counted; on
                a GPU, which nobody waits for, means are NaN instead.
        """
        told = told.double()
        hashes, squares = told[1:_FRONT].view(2, -1)
        alike = (size * squares == hashes.square()).all()
        if told.is_cuda:
            self.total = told[0]
            told = torch.where(alike, told, torch.nan)
        elif not alike:
            self.raise_of_structures()
        else:
            self.total = positive(int(told[0]))
        values = told[_FRONT:]
        if len(self._rest):
            dist.all_reduce(self._rest, group=group)
            values = torch.cat([values, self._rest])
        self.settle(values / self.total)

    def settle(self, means: Tensor) -> None:
        """Take the means of loss and metrics over the microbatches of all ranks."""
        self._means = split_like(means, self._first())

    def result(self) -> Any:
        """Return the mean loss, and the means of the metrics, if there are any."""
        if self._means is None:  # nobody else runs any
            if self._error is not None:
                raise self._error
            if len(self._seen) > 1:
                self.settle(self.sums() / self.count)
        own, *leaves = self._first()
        loss, *metrics = self._means or self._first()
        loss = wide(own) if loss is own else loss.to(wide(own))
        if not self._text:
            return loss
        found = dict(zip(self._paths, map(like, leaves, metrics), strict=True))
        return loss, mapped(self._metrics, lambda path, _: found[path])

    def _first(self) -> list[Any]:
        """Return loss and metrics of the first microbatch here."""
        return self._seen[0][0]

    def rows(self) -> list[tuple[Tensor, int]]:
        """Return, of each microbatch here, loss and metrics in one vector, and what it counts."""
        return [(torch.cat(list(map(self._flat, leaves))), count) for leaves, count in self._seen]

    def sums(self) -> Tensor:
        """Return the sums here of loss and metrics, each times what it counts."""
        if self._error is not None:
            return torch.zeros(1, dtype=torch.float64, device=self._first()[0].device)
        rows = self.rows()
        # 0 times NaN is NaN: what does not count is left out.
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


def wide(loss: Tensor) -> Tensor:
    """Return a loss in float32 at least."""
    return loss if loss.dtype in (torch.float32, torch.float64) else loss.float()


def checked(loss: Any) -> Tensor:
    """Return the loss that `loss_fn` has returned, without dimensions."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(()) if loss.ndim else loss
    must, cure = "`loss_fn` must return a tensor of one element", "take the mean over the samples"
    if isinstance(loss, Tensor):
        raise ValueError(f"{must}, but returned one of shape {tuple(loss.shape)}: {cure}")
    has_loss = hasattr(loss, "loss") or (isinstance(loss, Mapping) and "loss" in loss)
    cure = "return its `.loss`" if has_loss else f"{cure}, and return it"
    raise TypeError(
        f"{must}, but returned {kind_of(loss)}: {cure}, or it and metrics: (loss, metrics)"
    )

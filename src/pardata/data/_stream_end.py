"""Ranks whose streams may end at different steps stop at the same one."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from pardata.collective._agreement import agree, require_same
from pardata.collective._explanation import explained
from pardata.data._request import Fetched
from pardata.ranks._backend import device_of_counts
from pardata.ranks._table import ranks_text
from pardata.ranks._world import World


class _Vote:
    """What the ranks have for the next step, being summed while this step runs."""

    def __init__(self, coming: "_Drawn", here: World) -> None:
        device = device_of_counts(here.backend, here.device)
        samples = coming.samples()
        own = [coming.error is not None, coming.fetched is not None, samples, samples**2]
        self._sums = torch.tensor(own, dtype=torch.int64, device=device)
        self._work: Any = dist.all_reduce(self._sums, async_op=True)

    def sums(self) -> list[int]:
        """Return how many failed, how many have one, and their samples and squares of those."""
        with explained("the next step of an IterableDataset"):
            self._work.wait()
        sums: list[int] = self._sums.tolist()
        return sums


class _Drawn:
    """The next step of this rank, if there is one, or the error that it ended in."""

    def __init__(self, own: Iterator[Fetched]) -> None:
        self.fetched: Fetched | None = None
        self.error: Exception | None = None
        try:
            self.fetched = next(own, None)
        except Exception as error:  # noqa: BLE001  # raised again, on every rank
            self.error = error

    def samples(self) -> int:
        """Return how many samples the step has, over all ranks."""
        return 0 if self.fetched is None else self.fetched.step.samples

    def raise_on_all(self, here: World) -> None:
        """Raise an error of any rank on all. Collective."""

        def failed() -> dict[str, object]:
            error, self.error = self.error, None  # it holds frames that hold this
            if error is not None:
                raise error
            return {}

        agree(here, "the next step of an IterableDataset", failed)

    def ranks_with_less(self, here: World) -> str:
        """Say which ranks have fewer samples for this step than others. Collective."""
        told = agree(here, "the end of an IterableDataset", lambda: {"samples": self.samples()})
        counts: list[Any] = [facts["samples"] for facts in told]
        return ranks_text([rank for rank, count in enumerate(counts) if count < max(counts)])

    def compare_the_first(self, here: World) -> None:
        """Raise where ranks did not read the same. Collective."""
        digest = "" if self.fetched is None else self.fetched.digest
        told = agree(here, "iter(loader) of an IterableDataset", lambda: {"first samples": digest})
        cure = (
            "Let the stream yield the same samples everywhere, drawing from the default generators "
            "alone, or pass sharded=True if each rank and worker has its own."
        )
        require_same("make_loader(IterableDataset)", told, cure)


def together(
    own: Iterator[Fetched], here: World, *, sharded: bool, drop_last: bool
) -> Iterator[Fetched]:
    """Yield this rank's `own` steps, and imitate the last of them where only others have one left.

    Collective, without waiting at a step for that step: ranks tell each other what they have for
    the next one while this one is computed.

    Raises:
        RuntimeError: where a data set that all ranks read whole is not the same on each or ends at
            different steps, or a rank has nothing at all; on every rank. So does an error that
            `own` raises.
    """
    coming = _Drawn(own)
    last: Fetched | None = None
    vote = _Vote(coming, here)
    while True:
        failed, have, samples, squares = vote.sums()
        if failed:
            coming.raise_on_all(here)
        if not have or (have < here.size and sharded and drop_last):
            return
        # Numbers are all equal exactly if their mean square is the square of their mean.
        if not sharded and here.size * squares != samples**2:
            raise _ended_before(coming.ranks_with_less(here), here)
        if last is None:
            _check_first(coming, here, here.size - have, sharded=sharded)
        last = coming.fetched or _emptied(last)
        if coming.fetched is not None:
            coming = _Drawn(own)
        vote = _Vote(coming, here)
        yield last


def _emptied(last: Fetched | None) -> Fetched:
    """Return a step of the shape of this rank's last, without rows."""
    assert last is not None  # noqa: S101  # for the type checker: `_check_first` sees to it
    return last._replace(step=last.step._replace(rows=0))


def _ended_before(shorter: str, here: World) -> RuntimeError:
    return RuntimeError(
        f"every rank must read the same stream, but it ended on {shorter} of {here.size} before "
        f"the others: let it yield the same samples everywhere, drawing from the default "
        f"generators alone, or pass sharded=True if each rank has its own"
    )


def _check_first(first: _Drawn, here: World, without: int, *, sharded: bool) -> None:
    """Raise where ranks have nothing at all, or did not read the same. Collective."""
    if without:
        msg = (
            f"every rank must have a sample, but {without} of {here.size} have none at all: let "
            f"the data set yield some on each, or pass sharded=False"
        )
        raise RuntimeError(msg)
    if not sharded:
        first.compare_the_first(here)

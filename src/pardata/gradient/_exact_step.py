"""One step of `backward` under strategy "exact": integers are added, so no order can be seen."""

import math
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import compress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from pardata.data._microbatches import Microbatches
from pardata.gradient._count import Piece
from pardata.gradient._exact_means import Means
from pardata.gradient._exact_sums import Sums, summed
from pardata.gradient._fixed_point import LARGEST, SMALL, largest
from pardata.gradient._noise import noise_seed
from pardata.gradient._step import Step, gradients_aside
from pardata.model._exact import refused_kernels
from pardata.model._strategy import Replica
from pardata.ranks._logger import get_logger
from pardata.ranks._process import process
from pardata.ranks._world import world
from pardata.seeds._generators import forked_seed
from pardata.seeds._mix import mix

_log = get_logger(__name__)

_LOSS = "the loss"
_INFINITE = torch.finfo(torch.float64).max  # stands for infinity where that stands for NaN


class Report(NamedTuple):
    """What all ranks together have seen in a step.

    Attributes:
        overflow: what could not be added, and the largest of it, by name.
        large: what needs high words.
        used: which parameters have had a gradient.
        late: of each bucket, whether something was left when it had been sent.
        first: the number of the first microbatch that counts.
        failed: whether a rank ended in an error.
        alike: whether all have metrics of one structure.
    """

    overflow: dict[str, float]
    large: set[str]
    used: set[str]
    late: list[bool]
    first: int
    failed: bool
    alike: bool


class ExactStep(Step):
    """The gradient of each microbatch, weighted and rounded to fixed point, is added as integers.

    In memory that takes 8 bytes a parameter beside the gradient itself, kept from step to step, and
    16 during a step where gradients are beyond 1, and on a GPU. What is complete is sent while the
    last microbatch's backward still runs.
    """

    least = 1  # if a placeholder: by what it returns a rank that has none knows the metrics

    def __init__(self, replica: Replica, scaler: GradScaler | None, batch: Any) -> None:
        super().__init__(replica, scaler, batch)
        self.size = world().size
        device = next(self.module.parameters()).device
        if not isinstance(batch, Microbatches):
            raise TypeError(
                f"`batch` must be Microbatches under strategy 'exact', but is a "
                f"{type(batch).__name__}: pass microbatch_size to make_loader, so that pieces are "
                f"the same at every world size"
            )
        self._exact = exact = self.layer.exact
        # Raised within the step, so that the others hear it.
        self._refusal: Exception | None = refused_kernels(replica.model, exact.threads)
        self._means = Means(exact.module, device)
        trained = {name: p for name, p in exact.module.named_parameters() if p.requires_grad}
        self._sums = Sums(trained, device, exact.scratch)
        exact.scratch = []  # until this step ends well: what a failed one left may still be sent

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Run the microbatches of this rank in the block; then set what all ranks have together."""
        if self.pieces.left_out:
            self._refusal = self._refusal or ValueError(
                "a microbatch must have the samples that were read for it under strategy 'exact', "
                "whose weights are planned, but `collate_fn` has left some out: pass `count`, to "
                "tell how many there are"
            )
        self._exact.hook_parameters()
        self._sums.agree_on(self._key())
        failed: Exception | None = self._refusal  # also where this rank runs nothing
        with gradients_aside(self.module.parameters()):
            self._exact.receive = self._sums.add
            try:
                yield
            except Exception as error:  # noqa: BLE001  # raised below: the others wait for this rank
                failed = _of_compiler(error)
                self._means.restore()
            finally:
                self._exact.receive = None
            rows = self.tally.rows()
            self._conclude(self._added_up(failed, rows), rows)

    def _conclude(self, report: Report, rows: list[tuple[Tensor, int]]) -> None:
        """Take the means, and set gradients and buffers, unless something has overflown."""
        total = self.pieces.expected()
        self.tally.settle(self._means.add_up(rows, total, report.first))
        if not report.overflow:
            self._means.apply()
            self._sums.set_gradients(report.used, report.large)
            self._exact.scratch = [bucket.low for bucket in self._sums.buckets]
        elif self._leaves_overflow_to_scaler(report):
            self._sums.set_infinite(report.used)
        else:
            _log.warning("skipped step %d: %s", self.batch.step, self._text(report), ranks=[0])

    def around(self, piece: Piece) -> AbstractContextManager[None]:
        """Seed Python's and NumPy's generators as well: what they draw shows in the last bit."""
        if self._refusal is not None:
            raise self._refusal
        self._number, self._is_last = piece.number, piece is self.pieces.own[-1]
        return forked_seed(noise_seed(self.batch, self._number))

    def run(self, loss: Tensor, part: float) -> None:
        """Run the backward of a microbatch, which is `part` of the global batch."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        self._sums.add_gradients(scaled, part, last=self._is_last)
        self._means.add(part, self._number)

    def _added_up(self, failed: Exception | None, rows: list[tuple[Tensor, int]]) -> Report:
        """Add up what all ranks have, or raise. Collective."""
        if not self._sums.agreed:
            msg = (
                f"every rank must be at the same step of the same loader, train the same "
                f"parameters and have the same seed, but they differ; this one is at step "
                f"{self.batch.step} of epoch {self.batch.epoch}, trains "
                f"{len(self._sums.parameters)} parameters and has seed {process.seed}: call "
                f"backward equally often, freeze the same, and call seed_everything with the same "
                f"seed, on every rank"
            )
            raise failed or RuntimeError(msg)
        self._sums.send(rest=True)
        report = self._exchanged(failed, [row[:1] for row, count in rows if count])
        self._sums.receive(report.late, report.large)
        if failed is not None:
            raise failed
        if report.failed:
            raise RuntimeError(
                "every rank must run its microbatches, but another one failed: see its error"
            )
        if not report.alike:
            self.tally.raise_of_structures()
        raises = self._exact.on_overflow == "raise" and not self._leaves_overflow_to_scaler(report)
        if report.overflow and raises:
            raise OverflowError(self._text(report))
        return report

    def _exchanged(self, failed: Exception | None, losses: list[Tensor]) -> Report:
        """Tell the others what was seen here, and return what all say: of each number the most."""
        sums, means = self._sums, self._means
        names = [_LOSS, *sums.parameters, *means.names]  # in the order in which they are named
        loss = largest(torch.cat([sums.peaks.new_zeros(1), *losses]))
        peaks = torch.cat([loss[None], sums.peaks, *means.peaks()])
        key = float(zlib.crc32(self.tally.structure().encode()))
        late = [bucket.late is not None for bucket in sums.buckets]
        flags = [*(name in sums.counts for name in names), *late, failed is not None]
        rest = peaks.new_tensor([*flags, -means.first, key, -key])
        # The maximum of NaN and a number is not NaN with every backend: infinity stands for it.
        numbers = torch.nan_to_num(peaks, nan=torch.inf, posinf=_INFINITE)
        told = summed(torch.cat([numbers, rest]), dist.ReduceOp.MAX)
        most, is_used, rest = told.tensor_split([len(names), 2 * len(names)])
        *is_late, any_failed, minus_first, highest, minus_lowest = rest.tolist()
        pairs = list(zip(names, most.tolist(), strict=True))
        shown = {torch.inf: math.nan, _INFINITE: math.inf}
        return Report(
            overflow={name: shown.get(peak, peak) for name, peak in pairs if peak > LARGEST},
            large={name for name, peak in pairs if peak > SMALL},
            used=set(compress(names, is_used.tolist())),
            late=list(map(bool, is_late)),
            first=int(-minus_first),
            failed=bool(any_failed),
            alike=highest == -minus_lowest,
        )

    def _leaves_overflow_to_scaler(self, report: Report) -> bool:
        """Whether only gradients and the loss overflow, by which a scaler finds its scale."""
        known = {_LOSS, *self._sums.parameters}
        return self.scaler is not None and known.issuperset(report.overflow)

    def _key(self) -> int:
        """Return a number that is the same on all ranks which send the same at the same step."""
        batch = self.batch
        sizes = [(name, p.numel()) for name, p in self._sums.parameters.items()]
        sent = repr([sizes, self._means.shapes, self._means.names])
        place = batch.epoch, batch.step, noise_seed(batch)
        return mix(batch.seed, *place, *batch.counts, zlib.crc32(sent.encode()))

    def _text(self, report: Report) -> str:
        name, peak = next(iter(report.overflow.items()))
        kind = "gradient of" if name in self._sums.parameters else "change of the buffer"
        what = _LOSS if name == _LOSS else f"the {kind} `{name}`"
        return (
            f"numbers must be finite and at most 2**46 under strategy 'exact', but the largest of "
            f"{what} is {peak:g} ({len(report.overflow)} such): lower the learning rate, clip "
            f"inside the model, or pass wrap_model(..., on_overflow='skip') to leave such steps out"
        )


def _of_compiler(error: Exception) -> Exception:
    """Return an error, in other words where it is that dynamo would compile no more."""
    if type(error).__name__ != "FailOnRecompileLimitHit":  # to import it takes a second
        return error
    told = RuntimeError(
        "a compiled model must be compiled for each size of its inputs under strategy 'exact', but "
        "dynamo has reached its limit: pad inputs to fewer sizes, or raise "
        "torch._dynamo.config.recompile_limit (torch 2.6: cache_size_limit)"
    )
    told.__cause__ = error
    return told

"""One step of `backward` under strategy "exact": integers are added, so no order can be seen."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pardata.data._microbatches import Microbatches
from pardata.gradient._count import Piece, Pieces
from pardata.gradient._exact_means import LOSS, Means
from pardata.gradient._exact_report import Report, exchanged
from pardata.gradient._exact_sums import Sums
from pardata.gradient._step import Step
from pardata.model._exact import ExactModel
from pardata.ranks._logger import get_logger
from pardata.seeds._generators import forked_seed
from pardata.seeds._mix import mix

_log = get_logger(__name__)


class ExactStep(Step):
    """The gradient of each microbatch, weighted and rounded to fixed point, is added as integers.

    In memory that takes 8 bytes a parameter beside the gradient itself, kept from step to step, and
    16 during a step where gradients are beyond 1, and on a GPU. What is complete is sent while the
    last microbatch's backward still runs.
    """

    def __init__(self, model: nn.Module, wrapper: ExactModel, batch: Any, size: int) -> None:
        super().__init__(model, None, size)
        if not isinstance(batch, Microbatches):
            msg = (
                f"`batch` must be Microbatches under strategy 'exact', but is a "
                f"{type(batch).__name__}: pass microbatch_size to make_loader, so that pieces are "
                f"the same at every world size"
            )
            raise TypeError(msg)
        self._batch = batch
        self._exact = exact = wrapper.exact
        # Raised within the step, so that the others hear it.
        self._refusal = exact.refusal(model)
        device = self.sharing.device
        self._means = Means(exact.module, device)
        named = exact.module.named_parameters()
        self._parameters = {name: p for name, p in named if p.requires_grad}
        self._sums = Sums(self._parameters, size, device, exact.scratch)
        exact.scratch = []  # until this step ends well: what a failed one left may still be sent
        self._number = 0  # of the microbatch that is run

    @contextmanager
    def whole(self, pieces: Pieces) -> Iterator[None]:  # noqa: ARG002  # for other strategies
        """Run the microbatches of this rank in the block; then add up what all ranks have."""
        self._exact.hook_parameters()
        self._sums.agree_on(self._key())
        failed: Exception | None = self._refusal  # also where this rank runs nothing
        try:
            # What has a gradient before `run`, or where nothing counts, is used and adds nothing.
            with self._exact.gradients_to(partial(self._sums.add, weight=0.0)):
                yield
        except Exception as error:  # noqa: BLE001  # raised below: the others wait for this rank
            failed = error
        try:
            report = self._added_up(failed)
        except Exception:
            self._means.restore()
            raise
        if report.overflow:
            self._skip(report)
            return
        self._means.apply()
        self._sums.set_gradients(report.used, report.large)
        self._exact.scratch = self._sums.scratch

    @contextmanager
    def around(self, piece: Piece, *, last: bool) -> Iterator[None]:
        """Let the microbatch begin as any other: from the step's buffers, under its own seed."""
        if self._refusal is not None:
            raise self._refusal
        batch, self._number = self._batch, piece.number or 0
        self._sums.begin(last=last)
        self._means.restore()
        seed = mix(batch.seed, batch.epoch, batch.step, self._number, *b"backward")
        with forked_seed(seed, self.sharing.device):
            yield

    def run(self, loss: Tensor, part: float) -> None:
        """Run the backward of a microbatch, which is `part` of the global batch."""
        with self._exact.gradients_to(partial(self._sums.add, weight=part)):
            loss.backward()
        self._means.add(loss, part, self._number)

    def loss(self) -> Tensor:
        """Return the mean loss of the global batch, which is known by now."""
        return self._loss.to(self._dtype)

    def _added_up(self, failed: Exception | None) -> Report:
        """Add up what all ranks have, or raise. Collective."""
        if not self._sums.agreed():
            msg = (
                f"every rank must be at the same step of the same loader and train the same "
                f"parameters, but they differ; this one is at step {self._batch.step} of epoch "
                f"{self._batch.epoch} and trains {len(self._parameters)} parameters: call "
                f"backward equally often, and freeze the same, on every rank"
            )
            raise failed or RuntimeError(msg)
        late = self._sums.send_rest()
        report = exchanged(
            [*self._means.names, *self._parameters],
            torch.cat([self._means.peaks, self._sums.peaks]),
            self._sums.used,
            self._sums.sparse,
            late,
            first=self._means.first,
            failed=failed is not None,
            size=self.sharing.size,
        )
        self._loss = self._means.add_up(report.first, self.sharing.size)
        self._sums.receive(report.late, report.large)
        self._check(report, failed)
        return report

    def _key(self) -> int:
        """Return a number that is the same on all ranks which send the same at the same step."""
        batch = self._batch
        sizes = [(name, p.numel()) for name, p in self._parameters.items()]
        sent = repr([sizes, self._means.shapes, self._means.count])
        return mix(batch.seed, batch.epoch, batch.step, *batch.counts, zlib.crc32(sent.encode()))

    def _check(self, report: Report, failed: Exception | None) -> None:
        if failed is not None:
            raise failed
        if report.failed:
            msg = "every rank must run its microbatches, but another one failed: see its error"
            raise RuntimeError(msg)
        if report.sparse:
            msg = (
                f"gradients must be dense under strategy 'exact', but that of "
                f"`{min(report.sparse)}` is sparse: make the embedding with sparse=False"
            )
            raise TypeError(msg)
        if report.overflow and self._exact.on_overflow == "raise":
            raise OverflowError(self._text(report))

    def _skip(self, report: Report) -> None:
        self._means.restore()
        if LOSS in report.overflow:
            self._loss.fill_(torch.nan)
        _log.warning("skipped step %d: %s", self._batch.step, self._text(report), ranks=[0])

    def _text(self, report: Report) -> str:
        names = LOSS, *self._parameters, *report.overflow  # in this order
        name = next(name for name in names if name in report.overflow)
        peak = report.overflow[name]
        kinds = dict.fromkeys(self._parameters, "the gradient of `{}`") | {LOSS: "{}"}
        what = kinds.get(name, "the change of the buffer `{}`").format(name)
        return (
            f"numbers must be finite and at most 2**46 under strategy 'exact', but the largest of "
            f"{what} is {peak:g} ({len(report.overflow)} such): lower the learning rate, clip "
            f"inside the model, or pass wrap_model(..., on_overflow='skip') to leave such steps out"
        )

"""One step of `backward` under strategy "exact": integers are added, so no order can be seen."""

import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pardata.data._microbatches import Microbatches
from pardata.gradient import _fixed_point
from pardata.gradient._count import Piece, Pieces
from pardata.gradient._exact_buffers import Buffers
from pardata.gradient._exact_report import Largest, Report, Sameness
from pardata.gradient._exact_sums import Sums, emptied
from pardata.gradient._step import Step
from pardata.model._exact import ExactModel, check_kernels
from pardata.model._unwrap import unwrap
from pardata.ranks._logger import get_logger
from pardata.seeds._generators import forked_seed
from pardata.seeds._mix import mix

_log = get_logger(__name__)

_LOSS = "the loss"
_NONE = 2**53  # the number of a microbatch that there is not


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
        self._wrapper = wrapper
        self._refusal = _refusal(model, wrapper)
        self._batch = batch
        module, device = unwrap(model), self.sharing.device
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._buffers = Buffers(module, device)
        self._largest = Largest([_LOSS, *trained, *self._buffers.floating], device)
        # Given back by a step that ends well: what a failed one left may still be sent.
        buckets, wrapper._buckets = emptied(wrapper._buckets, trained, device), []  # noqa: SLF001  # our own class
        self._sums = Sums(trained, size, self._largest, self._is_same, buckets)
        self._first = _NONE
        self._words = [_fixed_point.zeros(1, device) for _ in range(2)]  # of the loss
        self._device = device

    def whole(self, pieces: Pieces) -> AbstractContextManager[None]:  # noqa: ARG002
        """Take the gradients as they are made; then add up those of all ranks."""
        return self._whole()

    @contextmanager
    def around(self, piece: Piece, *, last: bool) -> Iterator[None]:
        """Let the microbatch begin as any other: from the step's buffers, under its own seed."""
        if self._refusal is not None:
            raise self._refusal
        batch, number = self._batch, piece.number or 0
        self._sums.begin(last=last)
        self._buffers.restore()
        seed = mix(batch.seed, batch.epoch, batch.step, number, *b"backward")
        with forked_seed(seed, self._device):
            yield
        is_first = piece.count > 0 and self._first == _NONE
        self._first = number if is_first else self._first
        self._buffers.take(self._sums.weight, self._largest, is_first=is_first)
        self._largest.end()

    def run(self, loss: Tensor, part: float) -> None:
        """Run the backward of a microbatch, which is `part` of the global batch."""
        self._sums.weight = part
        self._largest.see(_LOSS, loss)
        _fixed_point.add(loss.to(self._device), part, *self._words)
        loss.backward()

    def loss(self) -> Tensor:
        """Return the mean loss of the global batch, which is known by now."""
        return self._loss.to(self._dtype)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        self._same = Sameness(self._key(), self._device, self.sharing.size)
        failed = self._refusal  # also where this rank runs nothing
        with self._wrapper._taking(self._sums.take):  # noqa: SLF001  # our own class
            try:
                yield
            except Exception as error:  # noqa: BLE001  # raised below: the others wait for this rank
                failed = error
        try:
            report = self._together(failed)
        except Exception:
            self._buffers.restore()
            raise
        self._loss = _fixed_point.value(*self._words)[0]
        if report.overflow:
            self._skip(report)
            return
        self._buffers.apply()
        for name, parameter in self._sums.parameters.items():
            if name in report.used:
                parameter.grad = self._sums.gradient(name)
        self._wrapper._buckets = self._sums.buckets  # noqa: SLF001  # our own class

    def _together(self, failed: Exception | None) -> Report:
        """Add up what all ranks have, or raise. Collective."""
        if not self._is_same():
            msg = (
                f"every rank must be at the same step of the same loader and train the same "
                f"parameters, but they differ; this one is at step {self._batch.step} of epoch "
                f"{self._batch.epoch} and trains {len(self._sums.parameters)} parameters: call "
                f"backward equally often, and freeze the same, on every rank"
            )
            raise failed or RuntimeError(msg)
        self._sums.send_rest()
        report = self._exchanged(failed)
        self._sums.receive(report.late, report.large)
        self._check(report, failed)
        return report

    def _is_same(self) -> bool:
        return self._same.holds()

    def _key(self) -> int:
        """Return a number that is the same on all ranks which send the same at the same step."""
        batch = self._batch
        sizes = [(name, p.numel()) for name, p in self._sums.parameters.items()]
        sent = repr([sizes, self._buffers.names, len(self._buffers.sums[0])])
        return mix(batch.seed, batch.epoch, batch.step, *batch.counts, zlib.crc32(sent.encode()))

    def _exchanged(self, failed: Exception | None) -> Report:
        """Add up what is small, and return what all ranks say. Collective."""
        size, buffers = self.sharing.size, self._buffers
        report = Report.exchanged(
            self._largest,
            self._sums.used,
            self._sums.sparse,
            self._sums.late(),
            first=self._first,
            failed=failed is not None,
            size=size,
        )
        if report.first != self._first:
            buffers.others.zero_()
        if size > 1:
            parts = [*self._words, *buffers.sums, buffers.others]
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(flat)
            sums = flat.split([part.numel() for part in parts])
            for part, total in zip(parts, sums, strict=True):
                part.copy_(total.view(part.shape))
        return report

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
        if report.overflow and self._wrapper._on_overflow == "raise":  # noqa: SLF001  # our own class
            raise OverflowError(self._text(report))

    def _skip(self, report: Report) -> None:
        self._buffers.restore()
        if _LOSS in report.overflow:
            self._loss.fill_(torch.nan)
        _log.warning("skipped step %d: %s", self._batch.step, self._text(report), ranks=[0])

    def _text(self, report: Report) -> str:
        name, number = next(iter(report.overflow.items()))
        what = f"the change of the buffer `{name}`"
        if name == _LOSS:
            what = name
        elif name in self._sums.parameters:
            what = f"the gradient of `{name}`"
        return (
            f"numbers must be finite and at most 2**46 under strategy 'exact', but the largest of "
            f"{what} is {number:g} ({len(report.overflow)} such): lower the learning rate, clip "
            f"inside the model, or pass wrap_model(..., on_overflow='skip') to leave such steps out"
        )


def _refusal(model: nn.Module, wrapper: ExactModel) -> Exception | None:
    """Return why this rank may not compute: raised within the step, so that the others hear it."""
    try:
        check_kernels(model)
        _check_threads(wrapper)
    except RuntimeError as error:
        return error
    return None


def _check_threads(wrapper: ExactModel) -> None:
    wanted, found = wrapper._threads, torch.get_num_threads()  # noqa: SLF001  # our own class
    if wanted != found:
        msg = (
            f"an exact run must keep its {wanted} thread(s), but PyTorch now has {found}: leave "
            f"torch.set_num_threads alone, or pass wrap_model(..., threads={found}) from the "
            f"beginning"
        )
        raise RuntimeError(msg)

"""One step of `backward` under "exact", whose sums are in the order of a fixed tree."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor

from pardata.collectives._fingerprint import CheckedCollective, WaitMinMax
from pardata.data._microbatches import Microbatches
from pardata.environment._world import cpu_group_and_device, world
from pardata.model._grads_and_buffers import StashedGradients
from pardata.model._torch_internals import parameters_of
from pardata.rng._rng_state import ForkedRng, default_generators, seed_generators
from pardata.store._rank_errors import has_lost_peer, mark_secondary
from pardata.store._round import Facts
from pardata.strategies._forward import active_step
from pardata.strategies._loss_weights import Microbatch, start_all_reduce
from pardata.strategies._step import Step, microbatch_seed
from pardata.strategies.exact._buffer_means import BufferMeans
from pardata.strategies.exact._numerics import numerics_error
from pardata.strategies.exact._tree_all_reduce import TreeAllReduce, TreeLayout

_NONE = 2**53  # stands for no microbatch


class _Agreement(NamedTuple):
    """The result of the comparison of all ranks, before gradients are sent.

    Attributes:
        is_same: whether step, structure of metrics and replica are the same on all ranks.
        has_failed: whether a rank has failed.
        first: the number of the first microbatch of the step that counts.
    """

    is_same: bool = False
    has_failed: bool = False
    first: int = _NONE


class ExactStep(Step):
    """Step of "exact": sums the weighted gradients of microbatches in a tree of fixed shape.

    Complete buckets are sent during the backward of the last microbatch. Ranks first compare their
    steps on the CPU, so the host waits for no GPU.
    """

    _vote: WaitMinMax | None = None
    _answer: _Agreement | None = None
    # A rank without microbatches runs a placeholder, to learn the structure of the metrics.
    min_microbatches = 1
    grads_are_averaged, has_ordered_sums = False, True
    gradients_are_final = False

    def _prepare(self) -> None:
        self.size = world().size
        if not isinstance(self.batch, Microbatches):
            msg = "`batch` must be Microbatches under strategy 'exact', but is a "
            msg += f"{type(self.batch).__name__}: pass microbatch_size to make_loader"
            raise TypeError(msg)
        self._sums = self.layer.exact
        self._begin_replica()
        # Raised in the step, so that other ranks get an error too.
        self._refusal: Exception | None = numerics_error(self.model, self._sums.threads)

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """Run this rank's microbatches in the block, then set gradients, buffers and means."""
        self._begin()
        failed = self._refusal  # also if this rank runs no microbatch
        # Python's and NumPy's generators are saved once a step, because NumPy takes 70 µs.
        stash = StashedGradients(parameters_of(self.module))
        with ForkedRng(default_generators()[:-1]), stash, active_step(self):
            try:
                try:
                    # Collective if counts are fractions, so before any error of a later microbatch.
                    self.loss_weights.totals()
                    yield
                except Exception as error:
                    if has_lost_peer(error):
                        raise
                    failed = error  # raised below, because the other ranks wait
                self._conclude(failed)
            except BaseException:
                # After an error on a GPU each kernel may raise it again.
                with suppress(RuntimeError):
                    self._means.put_back()  # otherwise buffers would differ between ranks
                raise
            finally:
                failed = None  # the frame would hold the error until a garbage collection

    def _begin(self) -> None:
        """Create the sums of the step."""
        if self.loss_weights.dropped_samples:
            self._refusal = self._refusal or ValueError(
                "under 'exact' `collate_fn` must keep all samples, but left some out: pass `count`"
            )
        module = self._sums.module
        self._sums.train({n: p for n, p in module.named_parameters() if p.requires_grad})
        counting = (one.number for one in self.loss_weights.microbatches if one.count)
        self._first = min(counting, default=_NONE)
        self._layout = TreeLayout(len(self.batch.counts))
        self._means = BufferMeans(module, self._layout, self._first)
        self._sums.begin_step(self._layout, self._may_send)

    def check_buffers(self) -> None:
        """Raise for a buffer that a forward has changed, in a single process too."""

        def refuse(text: str) -> None:
            raise RuntimeError(f"under strategy 'exact' {text}")

        self._refuse_buffers(refuse)

    def send(self) -> None:
        """Start the comparison of all ranks, before the last backward."""
        self._ask(failed=False)

    def _ask(self, *, failed: bool) -> None:
        # After an error on a GPU each kernel may raise it again.
        facts = 0 if failed else self._key(), failed, self._first
        self._vote = CheckedCollective("backward", dict, str).start_min_max(facts)

    def _outcome(self) -> _Agreement:
        """Return the result of the comparison; waits for it once."""
        if self._vote is not None:
            vote, self._vote, self._answer = self._vote, None, _Agreement()  # also if it raises
            (key, other_key), (_, failed), (first, _) = vote()
            self._answer = _Agreement(key == other_key, bool(failed), first)
        return self._answer or _Agreement()

    def _may_send(self) -> bool:
        """Whether ranks agree, because gloo ends a process that receives unexpected data."""
        outcome = self._outcome()
        return outcome.is_same and not outcome.has_failed

    @contextmanager
    def microbatch(self, microbatch: Microbatch) -> Iterator[None]:
        """Seed Python's and NumPy's generators too, and collect gradients and buffers."""
        if self._refusal is not None:
            raise self._refusal
        self._sums.begin(microbatch, last=microbatch is self.loss_weights.microbatches[-1])
        seed_generators(microbatch_seed(self.batch, microbatch.number), default_generators()[:-1])
        yield
        self.check_buffers()
        self._sums.end()
        self._means.add(microbatch, self.metrics.last())

    def _conclude(self, failed: Exception | None) -> None:
        """Finish the sums over all ranks, and set the results, or raise. Collective."""
        if self._answer is None and self._vote is None:
            self._ask(failed=True)
        first = self._require_agreement(failed).first
        rows = self._means.rows(len(self.metrics.last()), first)
        flags = [failed is not None, *self._sums.used()]
        payload = Payload(self._layout, rows, flags)
        if payload.fit():
            self._sums.send_rest(payload.sent())
            flags, sums = payload.received(self._sums.finish())
        else:
            flags, sums = self._send_separately(rows, flags)
        any_failed, *used = flags
        if any_failed:
            raise failed or _failed_elsewhere()
        total = self.loss_weights.global_total()
        self.metrics.set_means(self._means.apply(sums, total), total)
        if self.size > 1:
            self.metrics.spoil(self.metrics.replica.differs_on_device(None))
        self._sums.set_gradients(used)

    def _send_separately(self, rows: Tensor, flags: list[bool]) -> tuple[list[bool], Tensor]:
        """Return the flags and sums of all ranks, sent separately from gradients. Collective."""
        self._sums.send_rest()
        group, device = cpu_group_and_device(world())
        of_any = torch.tensor(flags, dtype=torch.int32, device=device)
        sums = TreeAllReduce(self._layout, rows)
        wait = start_all_reduce(of_any, group) if self.size > 1 else lambda: of_any
        self._sums.finish()
        sums.add()
        return (wait() > 0).tolist(), sums.result()

    def _require_agreement(self, failed: Exception | None) -> _Agreement:
        """Return the result of the comparison; raise on every rank if ranks differ."""
        outcome = self._outcome()
        if outcome.has_failed:
            raise failed or _failed_elsewhere()
        if self.size == 1:
            self.metrics.raise_refused()
        if not outcome.is_same:
            self.metrics.replica.raise_difference("backward", self._facts)
        return outcome

    def _key(self) -> int:
        """Return a hash of the step, its structure and the replica, which ranks compare."""
        if self.size == 1:
            return 0
        step, batch, metrics = self.metrics.step, self.batch, self.metrics.structure()
        replica = self._sums.digest, self._means.digest, self.metrics.replica.text()
        return zlib.crc32(repr((step, batch.counts, batch.runs, metrics, replica)).encode())

    def _facts(self) -> Facts:
        """Return what `_key` is a hash of, except the state of the replica."""
        facts = {"microbatches": self.batch.counts, "earlier calls": self.batch.runs}
        return {**self.metrics.facts(), **facts, **self._means.facts()}


def _failed_elsewhere() -> RuntimeError:
    # Marked as secondary, so that the log names the failed rank.
    text = "every rank must run its microbatches, but another one failed: see its error"
    return mark_secondary(RuntimeError(text))


_MOST = 2**14  # elements: above this size a separate collective is faster
_WORDS = 4  # a float64 has four 16-bit words, each of which a float32 represents exactly


class Payload:
    """A rank's flags and rows of means, sent in the last bucket of gradients.

    Each row has a slot of 16-bit words, to which the other ranks add zeros, so no sum rounds.

    Args:
        layout: the layout of the step.
        rows: the rows of this rank, float64 of shape (subtrees, width).
        flags: flags of this rank, equally many on each rank.
    """

    def __init__(self, layout: TreeLayout, rows: Tensor, flags: list[bool]) -> None:
        self._layout, self._rows, self._flags = layout, rows, flags
        self._width = rows.shape[1]
        self._length = len(flags) + len(layout.spans) * self._width * _WORDS

    def fit(self) -> bool:
        """Whether it is small, and every rank sends a bucket with it."""
        how = self._layout
        reaches = how.is_plain or min(how.counts) > 0
        return how.size > 1 and reaches and self._rows.is_cpu and self._length <= _MOST

    def sent(self) -> Tensor:
        """Return this rank's payload, float32 of shape (length,), to be summed over ranks."""
        how = self._layout
        places = torch.zeros(len(how.spans), self._width, dtype=torch.float64)
        places[how.first : how.first + how.local_count] = self._rows[: how.local_count]
        flags = torch.tensor(self._flags, dtype=torch.float32)
        return torch.cat([flags, places.view(torch.int16).flatten().float()])

    def received(self, total: Tensor) -> tuple[list[bool], Tensor]:
        """Return the flags set on any rank, and the tree sum of all rows, of shape (width,)."""
        count = len(self._flags)
        flags: list[bool] = (total[:count] > 0).tolist()
        words = total[count : self._length].to(torch.int16)
        return flags, self._layout.total(words.view(torch.float64).view(-1, self._width))

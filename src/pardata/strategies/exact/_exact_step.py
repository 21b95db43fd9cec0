"""One step of `backward` under "exact", whose sums are in the order of a fixed tree."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future

from pardata.collectives import _fingerprint as fingerprint
from pardata.data._microbatches import Microbatches
from pardata.environment._world import cpu_group_and_device, world
from pardata.model._torch_internals import parameters_of
from pardata.rng._rng_state import ForkedRng, default_generators, seed_generators
from pardata.rng._seeds import microbatch_seed
from pardata.store._rank_errors import has_lost_peer
from pardata.store._round import Facts
from pardata.strategies import _ddp_reducer as reducer
from pardata.strategies._ddp import DdpStep, HookedDDP
from pardata.strategies._loss_weights import Microbatch
from pardata.strategies.exact._buffer_means import BufferMeans
from pardata.strategies.exact._numerics import numerics_error
from pardata.strategies.exact._tree_all_reduce import IDENTITY, TreeAllReduce, TreeLayout
from pardata.strategies.exact._tree_gradients import TreeGradients

# ruff: noqa: SLF001  # the wrapper's own names are private, so as not to hide names of the module

_MOST = 2**14  # numbers that are sent behind a bucket: above this a separate collective is faster


class ExactStep(DdpStep):
    """Step of "exact": DDP sends the gradients, and its communication hook sums them in a tree.

    Ranks compare their steps on the CPU during the last backward, before the first bucket, because
    gloo ends a process that receives unexpected data. A rank with an error sends its buckets too,
    and then all raise one. A single process has no DDP.
    """

    _comparison: Any = None  # the all-reduce of the hash of this step
    _num_words = 0  # the length of the means behind the last bucket; 0 if sent separately
    grads_are_averaged, has_ordered_sums = False, True
    gradients_are_final = False

    def _prepare(self) -> None:
        if not isinstance(self.batch, Microbatches):
            msg = "`batch` must be Microbatches under strategy 'exact', but is a "
            msg += f"{type(self.batch).__name__}: pass microbatch_size to make_loader"
            raise TypeError(msg)
        if isinstance(self.layer, HookedDDP):
            super()._prepare()
        elif world().size > 1:
            msg = "`model` must be wrapped in this world, but was in one process: wrap it again"
            raise RuntimeError(msg)
        else:
            self._begin_replica()
        # Raised in the step, so that other ranks get an error too.
        self.metrics.errors += filter(None, [numerics_error(self.model, self.layer._threads)])

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """Run this rank's microbatches in the block, then set gradients, buffers and means."""
        # Python's and NumPy's generators are saved once a step, because NumPy takes 70 µs.
        with ForkedRng(default_generators()[:-1]), super().synchronized():
            try:
                # Collective if counts are fractions, so before any error of a later microbatch.
                self.loss_weights.totals()
                yield
            except _NotAgreedError:
                pass  # `_finish` raises the reason on every rank
            except Exception as error:
                if has_lost_peer(error):
                    raise
                self.metrics.errors.append(error)  # raised later, because the other ranks wait

    def _begin(self) -> None:
        if self.loss_weights.dropped_samples:
            msg = (
                "under 'exact' `collate_fn` must keep all samples, but left some out: pass `count`"
            )
            self.metrics.errors.append(ValueError(msg))
        self.layer._guard.extend()
        # A tied parameter is listed twice.
        self.trained = dict.fromkeys(p for p in parameters_of(self.module) if p.requires_grad)
        if self.size > 1 and not self.layer._reduced.are(self.trained):
            reducer.renew_reducer(self.layer, as_built=False)
        self._layout = TreeLayout(self.batch.ranges)
        self._gradients = TreeGradients(list(self.trained), self._layout)
        self._means = BufferMeans(self.module, self._layout)
        self._waiting: list[tuple[list[Tensor], Tensor, Future[Tensor]]] = []

    @contextmanager
    def microbatch(self, microbatch: Microbatch) -> Iterator[None]:
        """Seed Python's and NumPy's generators too, and collect gradients."""
        self.metrics.raise_refused()
        is_last = microbatch is self.loss_weights.microbatches[-1]
        counts = microbatch.count > 0
        seed_generators(microbatch_seed(self.batch, microbatch.number), default_generators()[:-1])
        if is_last and self.size > 1:
            self._gradients.last_counts = counts
            yield
        else:
            with super().microbatch(microbatch) if self.size > 1 else nullcontext():
                yield
            self._gradients.keep(microbatch.number, counts=counts)
        self._means.put_back()

    def end_forward(self, microbatch: Microbatch) -> None:
        self._means.add(microbatch, self.metrics.last())
        super().end_forward(microbatch)

    def send(self) -> None:
        """Start the comparison of all ranks, before the last backward."""
        if self.size > 1:
            self._compare()

    def _compare(self) -> None:
        """Start to compare the steps of all ranks, by hashes."""
        hashes = fingerprint.fingerprint_slots(f"backward {self._key()}", self.size)
        group, device = cpu_group_and_device(world())
        # As long as the header of each other call, so that a rank in another one gets an error.
        self._hashes = torch.zeros(fingerprint.HEADER, dtype=torch.float64, device=device)
        self._hashes[: fingerprint.HASHED] = torch.tensor(hashes, dtype=torch.float64)
        self._comparison = dist.all_reduce(self._hashes, group=group, async_op=True)

    def _agree(self) -> bool:
        """Return whether all ranks run the same step, and none has failed. Waits."""
        self._comparison.wait()
        return fingerprint.fingerprints_match(self._hashes[: fingerprint.HASHED].tolist())

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the sum of a bucket, or keep it until ranks are compared.

        DDP's communication hook calls it.
        """
        buffer, is_last = bucket.buffer(), bucket.is_last()
        done = Future[Tensor](devices=None if buffer.is_cpu else [buffer.device])
        self._waiting.append((bucket.parameters(), buffer, done))
        if not is_last and not self._comparison.is_completed():
            return done
        if not self._agree():
            raise _NotAgreedError
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            at_end = is_last and one[-1] is done
            self._gradients.send(*one, self._tail(buffer) if at_end else buffer.new_empty(0))
        if is_last:
            self._gradients.finish()
        return done

    def _tail(self, buffer: Tensor) -> Tensor:
        """Return the flags and rows of this rank, to send behind the last bucket.

        Empty on all ranks if a separate collective is faster.
        """
        flags, rows = self._flags_and_rows()
        how = self._layout
        words = reducer.to_words(rows[: how.local_count], len(how.spans), how.first)
        is_small = buffer.numel() <= reducer.SMALL and words.numel() <= _MOST and buffer.is_cpu
        # In an all-to-all, ranks without a subtree send nothing.
        if not is_small or not (how.is_plain or min(how.counts) > 0):
            return buffer.new_empty(0)
        self._num_words = words.numel()
        return torch.cat([flags, words])

    def _flags_and_rows(self) -> tuple[Tensor, Tensor]:
        """Return flags, whether this rank failed or used each parameter, and its rows of means."""
        flags = [bool(self.metrics.errors), *self._gradients.used()]
        return torch.tensor(flags, dtype=torch.float32, device="cpu"), self._means.rows()

    def _finish(self) -> None:
        """Finish the sums over all ranks, or raise on every rank. Collective."""
        if self.size > 1:
            if self._comparison is None:  # this rank has failed before
                self._compare()
            if not self._agree():
                self._raise_difference()
            self._gradients.complete()
            if not self.metrics.errors:
                super()._finish()
        if not self.metrics.errors or self._gradients.is_finished:
            (any_failed, *self._used), self._totals = self._reduced()
            if any_failed:
                self._raise_difference()
        self.metrics.raise_refused()  # in a single process, or after its last bucket

    def _raise_difference(self) -> None:
        self.metrics.replica.raise_difference("backward", self._facts)

    def _reduced(self) -> tuple[list[bool], Tensor]:
        """Return the flags and the sums of means of all ranks. Collective if they were not sent."""
        if self._num_words:
            sizes = 1 + len(self.trained), self._num_words
            flags, words = self._gradients.tail[: sum(sizes)].split(sizes)
            rows = reducer.from_words(words, len(self._layout.spans))
            return (flags > 0).tolist(), self._layout.total(rows)
        flags, rows = self._flags_and_rows()
        padding = 0, -rows.shape[1] % self.size  # each rank owns equally many elements
        sums = TreeAllReduce(self._layout, nn.functional.pad(rows, padding, value=IDENTITY))
        if self.size > 1:
            group, device = cpu_group_and_device(world())
            flags = flags.to(device)
            dist.all_reduce(flags, group=group)
        sums.add()
        return (flags > 0).tolist(), sums.result()

    def _take_means(self) -> None:
        """Set gradients, buffers and means."""
        total = self.loss_weights.global_total()
        self.metrics.set_means(self._means.apply(self._totals, total), total)
        self._gradients.set_gradients(self._used)
        if self.size > 1:
            self.metrics.spoil(self.metrics.replica.differs_on_device(None))
            # Here, where all ranks have succeeded, because it is collective.
            self._arrange_buckets()

    def _reset(self) -> None:
        # After an error on a GPU each kernel may raise it again.
        with suppress(RuntimeError):
            self._means.put_back()  # otherwise buffers would differ between ranks
        if self.size > 1:
            super()._reset()

    def _key(self) -> str:
        """Return a text of the step, its structure and the replica, which ranks compare."""
        step, batch, metrics = self.metrics.step, self.batch, self.metrics.structure()
        replica = self.layer._reduced.text, self._means.digest, self.metrics.replica.text()
        return repr((step, batch.counts, batch.ranges, batch.calls, metrics, replica))

    def _facts(self) -> Facts:
        """Return the facts of `_key`, except the state of the replica; raise a kept error."""
        facts = {"microbatches": self.batch.counts, "earlier calls": self.batch.calls}
        facts["ranges of microbatches"] = str(self.batch.ranges)
        return {**self.metrics.facts(), **facts, **self._means.facts()}


class _NotAgreedError(Exception):
    """Ends a backward, because ranks differ or one has failed."""

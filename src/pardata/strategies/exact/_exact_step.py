"""One step of `backward` under strategy "exact": sums in a fixed tree, so no order can be seen."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from pardata.collective._vote import Vote
from pardata.data._microbatches import Microbatches
from pardata.messages._failure import as_consequence
from pardata.model._before import AsFound
from pardata.ranks._world import way_of_counts, world
from pardata.seeds._generators import Kept, default_generators
from pardata.seeds._mix import mix
from pardata.seeds._run_seed import run_seed
from pardata.step._count import Piece
from pardata.step._guests import Guests
from pardata.step._noise import noise_seed
from pardata.step._step import Replica, Step
from pardata.strategies.exact._exact_means import Means
from pardata.strategies.exact._exact_sums import Sums
from pardata.strategies.exact._hooks import Exactness
from pardata.strategies.exact._kernels import refused_kernels
from pardata.strategies.exact._ordered_sum import Exchange
from pardata.strategies.exact._riders import Heard, Riders

_NONE = 2**53  # the number of a microbatch that there is not

# What a model has trained last, with its buckets.
_sums_of = WeakKeyDictionary[Exactness, Sums]()


class _Heard(NamedTuple):
    """What all ranks have said before anything is sent.

    Attributes:
        is_same: whether they are at the same step and train the same.
        has_failed: whether one has failed.
        is_alike: whether what `loss_fn` returns has the same structure.
        first: the number of the first microbatch that counts.
    """

    is_same: bool = False
    has_failed: bool = False
    is_alike: bool = False
    first: int = _NONE

    @property
    def may_send(self) -> bool:
        """Whether all send the same: gloo ends a process that gets what it does not expect."""
        return self.is_same and self.is_alike and not self.has_failed


class ExactStep(Step):
    """The gradients of the microbatches, already weighted, are added in a tree of a fixed shape.

    What is complete is sent while the last microbatch's backward still runs. No device is waited
    for: what ranks must know of each other before that, they tell on the CPU.
    """

    _asked: Vote | None = None
    _answer: _Heard | None = None
    least = 1  # if a placeholder: by what it returns a rank that has none knows the metrics
    may_ride = True  # what is told at the end, with the gradients
    strided = False  # whether a rank's share is every `size`-th microbatch, and no run of them
    wrong_shares = (
        "`batch` must hold a run of microbatches under strategy 'exact', but is strided: leave out "
        "strided=True where it is made, or wrap with 'exact_fsdp'"
    )

    def __init__(self, replica: Replica, scaler: GradScaler | None, batch: Any) -> None:
        super().__init__(replica, scaler, batch)
        self.size = world().size
        if not isinstance(batch, Microbatches):
            raise TypeError(
                f"`batch` must be Microbatches under strategy 'exact', but is a "
                f"{type(batch).__name__}: pass microbatch_size to make_loader, so that they are "
                f"the same at every world size"
            )
        if self.size == batch.size > 1 and self.strided != (batch.stride > 1):
            raise ValueError(self.wrong_shares)
        self._exact = self.layer.exact
        # Raised within the step, so that the others hear it.
        self._refusal: Exception | None = refused_kernels(replica.model, self._exact.threads)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Run the microbatches of this rank in the block; then set what all ranks have together."""
        self._begin()
        failed: Exception | None = self._refusal  # also where this rank runs nothing
        with AsFound(self.module), self._guests:
            self._exact.receive = self._sums.receive
            try:
                yield
            except Exception as error:  # noqa: BLE001  # raised below: the others wait for this rank
                failed = of_compiler(error)
            finally:
                self._exact.receive = None
            self._conclude(failed)

    def _begin(self) -> None:
        """Make what is added to."""
        if self.pieces.left_out:
            self._refusal = self._refusal or ValueError(
                "a microbatch must have the samples that were read for it under strategy 'exact', "
                "whose weights are planned, but `collate_fn` has left some out: pass `count`, to "
                "tell how many there are"
            )
        # What a guest does to its buffers depends on who runs which microbatch: that is undone.
        self._guests = Guests(self.layer, keeps_buffers=True)
        trained = {n: p for n, p in self._exact.module.named_parameters() if p.requires_grad}
        sums = self._sums_for(trained)
        counting = (piece.number for piece in self.pieces.own if piece.count)
        self._first = min(counting, default=_NONE)
        self._exchange = exchange = Exchange(len(self.batch.counts), strided=self.strided)
        device = next(self.module.parameters()).device
        self._sums, self._means = sums, Means(self._exact.module, device, exchange, self._first)
        sums.begin_step(exchange, lambda: self._heard().may_send)

    def _sums_for(self, trained: dict[str, nn.Parameter]) -> Any:
        """Return what adds up the gradients."""
        self._exact.hook_parameters()
        sums = _sums_of.get(self._exact)
        if sums is None or not sums.are_of(trained):
            sums = _sums_of[self._exact] = Sums(trained)
        return sums

    def send(self) -> None:
        """Ask all ranks, before the last backward, whether they are about to send the same."""
        self._ask(failed=False)

    def _ask(self, *, failed: bool) -> None:
        facts = self._key(), failed, zlib.crc32(self.tally.structure().encode()), self._first
        self._asked = Vote(world(), "backward", facts)

    def _heard(self) -> _Heard:
        """Return what all have said."""
        if self._asked is not None:
            vote, self._asked, self._answer = self._asked, None, _Heard()  # also where it raises
            (key, other_key), (_, failed), (text, other_text), (first, _) = vote.result()
            self._answer = _Heard(key == other_key, bool(failed), text == other_text, first)
        return self._answer or _Heard()

    @contextmanager
    def around(self, piece: Piece) -> Iterator[None]:
        """Seed Python's and NumPy's generators as well as PyTorch's: they show in the last bit."""
        if self._refusal is not None:
            raise self._refusal
        self._guests.put_back_buffers()
        self._sums.begin(piece, last=piece is self.pieces.own[-1])
        with Kept(default_generators()[:-1], noise_seed(self.batch, piece.number)):
            yield
        self._sums.end()
        self._means.add(piece, self.tally.last())

    def run(self, loss: Tensor, part: float) -> None:
        """Run the backward of a microbatch, which is `part` of the global batch."""
        weighted = loss if part == 1 else loss * part
        (weighted if self.scaler is None else self.scaler.scale(weighted)).backward()

    def _conclude(self, failed: Exception | None) -> None:
        """Add up what all ranks have, and set it, or raise. Collective."""
        if self._answer is None and self._asked is None:
            self._ask(failed=True)
        heard = self._agreed(failed)
        used = self._sums.used()
        rows = self._means.rows(len(self.tally.last()), heard.first)
        riders = Riders(self._exchange, rows, used)
        if self.may_ride and riders.fit():
            self._sums.send_rest(riders.told(failed=failed is not None))
            self._sums.finish()
            any_failed, of_any, sums = riders.heard(self._sums.told())
        else:
            any_failed, of_any, sums = self._heard_apart(rows, used, failed)
        if any_failed:
            raise failed or _failed_elsewhere()
        self.tally.settle(self._means.apply(sums, self.pieces.expected()))
        self._sums.set_gradients(of_any)

    def _heard_apart(self, rows: Tensor, used: list[bool], failed: Exception | None) -> Heard:
        """Add up, and hear, what does not ride with the gradients. Collective."""
        self._sums.send_rest()
        sums = self._exchange.start(rows)
        vote = Vote(world(), "backward", [failed is not None, zlib.crc32(bytes(used))])
        sums.add()
        self._sums.finish()
        (_, any_failed), (least, most) = vote.result()
        is_alike = any_failed or least == most
        return Heard(bool(any_failed), used if is_alike else _of_any(used), sums.result())

    def _agreed(self, failed: Exception | None) -> _Heard:
        """Return what all ranks have said; raise on each of them where they do not agree."""
        heard = self._heard()
        if not heard.is_same:
            msg = (
                f"every rank must be at the same step of the same loader, train the same "
                f"parameters and have the same seed, but they differ; this one is at step "
                f"{self.batch.step} of epoch {self.batch.epoch}, trains "
                f"{len(self._sums.parameters)} parameters and has seed {run_seed.seed}: call "
                f"backward equally often, freeze the same, and call seed_everything with the same "
                f"seed, on every rank"
            )
            raise failed or RuntimeError(msg)
        if heard.has_failed:
            raise failed or _failed_elsewhere()
        if not heard.is_alike:
            self.tally.raise_of_structures()
        return heard

    def _key(self) -> int:
        """Return a number that is the same on all ranks which send the same at the same step."""
        batch = self.batch
        place = batch.epoch, batch.step, noise_seed(batch)
        sent = zlib.crc32(repr(self._means.shapes).encode(), self._sums.digest)
        return mix(batch.seed, *place, *batch.counts, sent)


def _failed_elsewhere() -> RuntimeError:
    # Marked, so that the log says which one, and how.
    text = "every rank must run its microbatches, but another one failed: see its error"
    return as_consequence(RuntimeError(text))


def _of_any(flags: list[bool]) -> list[bool]:
    """Return which are set on any rank. Collective."""
    group, device = way_of_counts(world())
    told = torch.tensor(flags, dtype=torch.uint8, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    return list(map(bool, told.tolist()))


def of_compiler(error: Exception) -> Exception:
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

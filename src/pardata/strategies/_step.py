"""One step of `backward`: of a model trained alone, or whose gradients PyTorch reduces."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from pardata.data._microbatches import Microbatches
from pardata.environment._device import sequence_number
from pardata.environment._world import is_alone, world
from pardata.model._before import GradientsAside, KeptBuffers
from pardata.model._sharding import unsharded
from pardata.model._torch_internals import parameters_of, uncompiled
from pardata.model._unwrap import layers
from pardata.rng._seeds import mix, run_seed
from pardata.store._current_op import forbidding_calls
from pardata.strategies._forward import leaves_of
from pardata.strategies._loss_weights import Microbatch, Replicas, Share, started
from pardata.strategies._step_metrics import StepMetrics

_NOTHING = nullcontext()
_LEAST = 1e-30  # changes no divisor but 0
# Set on the layer of a model that shows its strategy.
SEEN = "_pardata_trains_alone"
_METRICS = "_pardata_known_metrics"
_COMMUNICATES = "_pardata_loss_communicates"


# The layers of the models whose steps are under way, of which the innermost is the last.
_under_way: list[nn.Module] = []


@contextmanager
def under_way(layer: nn.Module) -> Iterator[None]:
    """Let a step of the model with this layer be under way in the block."""
    _under_way.append(layer)
    try:
        yield
    finally:
        _under_way.pop()


def model_under_way() -> nn.Module | None:
    """Return the layer of the model whose step is under way, the innermost one, if any is."""
    if torch.compiler.is_compiling():
        return _uncompiled_model_under_way()
    return _under_way[-1] if _under_way else None


_uncompiled_model_under_way = uncompiled(model_under_way)


@uncompiled
def forward_aside(module: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
    """Run a module in the step of another model, and leave its buffers as they are.

    Ranks may do so unequally often, so nothing is sent.
    """
    with KeptBuffers(module.modules()):
        return module(*inputs, **kwargs)


def forbidden_in(batch: Any) -> AbstractContextManager[None]:
    """Return the context of `loss_fn`, in which it must not start collectives of pardata.

    `batch` is what `backward` was given. Of anything but `Microbatches` every rank runs one.
    """
    if not isinstance(batch, Microbatches):
        return _NOTHING
    return forbidding_calls(
        "must not be called in `loss_fn` with Microbatches, which may be unequally many on the "
        "ranks: return numbers and metrics from `loss_fn`, or let `count` return what a microbatch "
        "counts: backward takes their means over all ranks; or call it before backward"
    )


def _unequally_often(microbatches: int, size: int) -> RuntimeError:
    return RuntimeError(
        f"`loss_fn` must not call torch.distributed if ranks run unequally many microbatches, but "
        f"has done so, and {size} ranks share {microbatches} microbatches: let it return sums and "
        f"counts as metrics, or make microbatches that all ranks share equally"
    )


def known_metrics(layer: nn.Module) -> set[str]:
    """Return the structures of metrics that the steps of a model have had."""
    known: set[str] = vars(layer).setdefault(_METRICS, set())
    return known


class Step(Replicas):
    """Of a model that no other process trains: strategies "none" and "dp".

    Args:
        model: all of it, in its layers.
        layer: of that, the one by which its strategy is known; under "none" the outermost.
        scaler: scales what is run, if there is one.
        batch: what `backward` was given.

    Attributes:
        module: the module inside all layers.
        share: what is run, as soon as that is known.
        takes_means: whether who reduces the gradients takes their mean over the ranks.
        metrics: losses and metrics of its microbatches.
    """

    share: Share
    takes_means = True

    def __init__(self, model: nn.Module, layer: Any, scaler: GradScaler | None, batch: Any) -> None:
        super().__init__(layer)
        self.model, self.module = model, layers(model)[-1]
        self.scaler, self.batch = scaler, batch
        self.metrics = StepMetrics(known_metrics(layer))
        self._prepare()

    def _prepare(self) -> None:
        """Find out who runs this step, and refuse what cannot be run."""

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """Run the step in the block; after it `metrics` has the means over all ranks.

        A step that ends in an error leaves gradients as they were.
        """
        with GradientsAside(parameters_of(self.module)):
            yield
            self.metrics.raise_refused()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run `loss_fn` on a microbatch in the block. With `Microbatches` it must not communicate.

        Raises:
            RuntimeError: on every rank, if it has called torch.distributed in the model's first
                step, and ranks run unequally many microbatches.
        """
        known, is_even = vars(self.layer), True
        if isinstance(self.batch, Microbatches):
            is_even = len(self.batch.counts) % self.size == 0
        if not is_even and known.get(_COMMUNICATES):
            raise _unequally_often(len(self.batch.counts), self.size)
        # Under FSDP a forward communicates by itself, and all ranks run equally many.
        looks = self.size > 1 and SEEN not in known and not self.equally_many
        others, before = self._others(), sequence_number(self.group) if looks else 0
        with forbidden_in(self.batch):
            yield
        if looks and others == self._others() and sequence_number(self.group) != before:
            known[_COMMUNICATES] = True
            if not is_even:
                raise _unequally_often(len(self.batch.counts), self.size)

    def _others(self) -> object:
        """Return what changes where the wrapper has started a collective by itself."""

    def microbatch(self, microbatch: Microbatch) -> AbstractContextManager[None]:  # noqa: ARG002  # the exact step uses it
        """Return the context of the forward and backward of one microbatch."""
        return _NOTHING

    def send(self) -> None:
        """Tell the others what was seen here, before the last backward runs."""

    def check(self, loss: Tensor) -> None:
        """Refuse, in a model's first step, a loss that trains something else, also in one process.

        Its gradient would be each rank's own. Every rank looks before its first backward.
        """
        if SEEN in vars(self.layer):
            return
        own = {*self.layer.parameters(), *unsharded(self.layer)}
        for leaf in leaves_of(loss):
            if isinstance(leaf, nn.Parameter) and leaf not in own:
                raise RuntimeError(
                    f"the loss must train only the model that `backward` gets, but it also trains "
                    f"a parameter of shape {tuple(leaf.shape)} outside of it, whose gradient no "
                    f"rank would synchronise: freeze it during this call (requires_grad_(False) "
                    f"before, requires_grad_(True) after), detach its output, or put both into "
                    f"one module and wrap that"
                )
        vars(self.layer)[SEEN] = True

    def run(self, loss: Tensor, part: float) -> None:
        """Run the backward of a microbatch, which is `part` of the global batch."""
        # The mean is taken of what is meant as a sum.
        factor = part * self.size if self.takes_means else part
        scaled = loss if factor == 1 else loss * factor
        (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()


class SharedStep(Step):
    """Of ranks whose gradients are averaged by another's hand: PyTorch's.

    If no plan says what all of them count, that is only known with the gradients. These are then
    off by one factor, the same everywhere.
    """

    def _prepare(self) -> None:
        self.group = getattr(self.layer, "process_group", None)
        self.size = dist.get_world_size(self.group)
        if isinstance(self.batch, Microbatches):  # else nothing says whose step it is
            where = f"step {self.batch.step} of epoch {self.batch.epoch}"
            self.metrics.step = f"{where}, of a loader with seed {self.batch.seed}"

    def _sums(self) -> Tensor:
        """Return the sums of what all ranks tell.

        They are sent after the backward. A step may fail on all ranks, in another microbatch on
        each: none of them has then begun a collective that the others have not.
        """
        return started(self.metrics.message(self.size, self.layer), self.group)()

    def _take_means(self) -> None:
        """Take the means, and correct the gradients where more or less was counted than expected.

        None of an earlier step may be in ``.grad``.
        """
        if self.size == 1:
            self.metrics.raise_refused()
            return
        self.metrics.receive(self._sums(), self.group)
        divisor = self.metrics.total / self.share.expected()
        if not isinstance(divisor, Tensor) and math.isclose(divisor, 1, rel_tol=1e-12):
            return  # sums of fractions may differ in a last bit
        gradients: list[Any] = [p.grad for p in self.module.parameters() if p.grad is not None]
        gradients = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
        for device, dtype in {(g.device, g.dtype) for g in gradients}:
            by = divisor
            if isinstance(divisor, Tensor):
                # One dtype takes one kernel. A divisor in 16 bits would be too coarse.
                by = divisor.new_empty((), dtype=dtype if dtype.itemsize > 2 else divisor.dtype)
                # Where nothing was counted, gradients are 0. They may be offloaded to the CPU.
                by = torch.add(divisor, _LEAST, out=by).to(device)
            alike = [g for g in gradients if (g.device, g.dtype) == (device, dtype)]
            with torch.no_grad():
                torch._foreach_div_(alike, by)  # as optimizers do


def microbatch_seed(batch: Any, number: int = 0) -> int:
    """Return the seed of microbatch `number` of a step, the same at every world size.

    Another in each run of the step. What is no `Microbatches` has another with each call, and on
    each rank.
    """
    if isinstance(batch, Microbatches):
        seed = batch.seed if run_seed.seed is None else run_seed.seed
        again = [batch.runs] if batch.runs else []
        return mix(_mixed(seed, batch.epoch) + batch.step, number, *again)
    run_seed.calls += 1
    seed = torch.default_generator.initial_seed() if run_seed.seed is None else run_seed.seed
    rank = 0 if is_alone() else world().rank
    return _mixed(seed, rank) + run_seed.calls


def count_run(batch: Any) -> None:
    """Let the next call on these microbatches draw other numbers: this one has ended well."""
    if isinstance(batch, Microbatches):
        batch.runs += 1


@lru_cache(maxsize=16)
def _mixed(*numbers: int) -> int:
    """Mix what stays the same for a while: that takes microseconds of a step."""
    return mix(*numbers, *b"noise")

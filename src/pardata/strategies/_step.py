"""One step of `backward`: in a single process, or with gradients that PyTorch reduces."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from pardata.data._microbatches import Microbatches
from pardata.environment._device import sequence_number
from pardata.environment._logger import get_logger
from pardata.model._fsdp_utils import unsharded_parameters
from pardata.model._grads_and_buffers import BufferWrites, StashedGradients
from pardata.model._replica_state import ReplicaState
from pardata.model._torch_internals import name_of_hooked, parameters_of
from pardata.model._unwrap import wrapper_chain
from pardata.store._current_op import forbidding_calls
from pardata.strategies._forward import active_step, leaves_of
from pardata.strategies._loss_weights import LossWeights, Microbatch, Replicas, start_all_reduce
from pardata.strategies._step_metrics import StepMetrics

_log = get_logger(__name__)

_NOTHING = nullcontext()
_LEAST = 1e-30  # changes no divisor except 0


def forbidden_in(batch: Any) -> AbstractContextManager[None]:
    """Return a context for `loss_fn` in which collectives of pardata raise.

    Not for a batch that is no `Microbatches`, of which every rank runs one.
    """
    if not isinstance(batch, Microbatches):
        return _NOTHING
    return forbidding_calls(
        "must not be called in `loss_fn` with Microbatches: return metrics, of which backward "
        "takes the mean over all ranks, or call it before backward"
    )


class Step(Replicas):
    """A step in a single process: strategies "none" and "dp", and the base of all steps.

    Args:
        model: the model with all its wrappers.
        layer: the wrapper that belongs to its strategy; under "none" the model.
        scaler: scales the losses, if there is one.
        batch: the batch of `backward`.

    Attributes:
        module: the module inside all wrappers.
        loss_weights: the microbatches and their weights, set by `backward`.
        grads_are_averaged: whether the reduction of gradients takes their mean over the ranks.
        looks: whether to look at hooks, and at what the loss trains, in the first microbatch.
        metrics: the losses and metrics of the microbatches.
    """

    loss_weights: LossWeights
    grads_are_averaged = True

    def __init__(self, model: nn.Module, layer: Any, scaler: GradScaler | None, batch: Any) -> None:
        super().__init__(layer)
        self.model, self.module = model, wrapper_chain(model)[-1]
        self.scaler, self.batch = scaler, batch
        self.metrics = StepMetrics(layer)
        self._writes = BufferWrites(layer)
        self.looks = not self.record.is_checked
        self._prepare()

    def _prepare(self) -> None:
        """Set the ranks that run this step, and raise for a model or batch that cannot be run."""

    def _begin_replica(self) -> None:
        """Count the step, which ranks compare with the state of their replicas."""
        self.metrics.replica = replica = ReplicaState.of(self.layer)
        replica.step += 1
        self.looks = self.looks or replica.is_due
        if isinstance(self.batch, Microbatches):  # other batches have no step number
            where = f"step {self.batch.step} of epoch {self.batch.epoch}"
            self.metrics.step = f"{where}, of a loader with seed {self.batch.seed}"

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """Run the step in the block; after it `metrics` has the means over all ranks.

        After an error gradients are as before.
        """
        with StashedGradients(parameters_of(self.module)), active_step(self):
            yield
            self.metrics.raise_refused()
        self.found["is_single"] = self.size == 1

    @property
    def gradients_are_final(self) -> bool:
        """Whether a hook on a parameter sees the gradient of the whole step."""
        return self.size == 1 and len(self.loss_weights.microbatches) == 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of `loss_fn` on a microbatch: raises if it communicates with `Microbatches`.

        Raises:
            RuntimeError: on every rank: it called torch.distributed in the model's first step, and
                ranks run unequally many microbatches. Or a user's hook would see the gradient of a
                part of the step.
        """
        if self.looks and not self.gradients_are_final and (name := name_of_hooked(self.module)):
            msg = f"`{name}` must have no register_post_accumulate_grad_hook, which would see a "
            msg += "part of the gradient, but has: step after backward"
            raise RuntimeError(msg)
        if self.record.loss_communicates:
            self._check_even()
        # Not under FSDP, whose forward communicates, and of which all ranks run equally many.
        looks = self.size > 1 and not (self.record.is_checked or self.equal_microbatches)
        before = sequence_number(self.group) if looks else 0
        with forbidden_in(self.batch):
            yield
        if looks and sequence_number(self.group) != before:
            self.found["loss_communicates"] = True
            self._check_even()

    def _check_even(self) -> None:
        """Raise if ranks run unequally many microbatches."""
        if isinstance(self.batch, Microbatches) and len(self.batch.counts) % self.size:
            msg = "`loss_fn` must not call torch.distributed if ranks run unequally many "
            msg += f"microbatches, here {len(self.batch.counts)} on {self.size} ranks: return "
            msg += "metrics, or let ranks share them equally"
            raise RuntimeError(msg)

    def microbatch(self, microbatch: Microbatch) -> AbstractContextManager[None]:  # noqa: ARG002  # `ExactStep` uses it
        """Return the context of the forward and backward of one microbatch."""
        return _NOTHING

    def end_forward(self, microbatch: Microbatch) -> None:
        """End the forward of a microbatch, before its backward."""
        if microbatch is self.loss_weights.microbatches[-1]:
            self.check_buffers()
            self.send()

    def send(self) -> None:
        """Send this rank's metrics, or compare them, before the last backward."""

    def check(self, loss: Tensor) -> None:
        """Raise for a loss that trains parameters outside of the model.

        Their gradients would differ between ranks. Every rank checks before its first backward, in
        the first step and in those in which weights are compared.
        """
        if not self.looks:
            return
        self.looks, self.found["is_checked"] = False, True
        parameters = {*self.layer.parameters(), *unsharded_parameters(self.layer)}
        for leaf in leaves_of(loss):
            if isinstance(leaf, nn.Parameter) and leaf not in parameters:
                raise RuntimeError(
                    f"the loss must train only `model`, but also trains a parameter of shape "
                    f"{tuple(leaf.shape)}: freeze it (requires_grad_(False)), or wrap both as one"
                )

    def check_buffers(self) -> None:
        """Warn of a buffer that a forward has changed by a part of the batch, or raise."""
        is_global_batch = self.size == len(self.loss_weights.microbatches) == 1
        if (is_global_batch and not self.has_ordered_sums) or not (name := self._writes.find()):
            return
        msg = "a forward must change no floating-point buffer in `backward`, but has changed "
        msg += f"`{name}` by a part of the batch: return the statistic as a metric (a tensor, or "
        msg += "Mean) and change the buffer after the step; or declare forward_updates_buffers = "
        msg += "True in its module, if ranks may differ there"
        if self.has_ordered_sums:
            raise RuntimeError(f"under strategy 'exact' {msg}")
        _log.warning(msg, ranks="all", once=True)

    def backward(self, loss: Tensor, weight: float) -> None:
        """Run the backward of a microbatch with this weight in the mean over the global batch."""
        # DDP and FSDP divide by the world size; the factor turns their mean into a sum.
        factor = weight * self.size if self.grads_are_averaged else weight
        with ExitStack() as stack:
            if loss.dtype.itemsize < 4 and math.frexp(factor)[0] != 0.5:  # no power of 2
                # A loss of 16 bits would round it, so each gradient is multiplied by it.
                weigh, factor = partial(torch.mul, other=factor), 1
                for p in {*self.layer.parameters(), *unsharded_parameters(self.layer)}:
                    if p.requires_grad:
                        stack.enter_context(p.register_hook(weigh))
            scaled = loss if factor == 1 else loss * factor
            (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()


class DistributedStep(Step):
    """A step whose gradients PyTorch reduces: strategies "ddp" and "fsdp".

    For a batch that no loader made, the global count is known only after the reduction. The
    gradients are then rescaled by one factor.
    """

    def _prepare(self) -> None:
        self.group = getattr(self.layer, "process_group", None)
        self.size = dist.get_world_size(self.group)
        self._begin_replica()

    def _sums(self) -> Tensor:
        """Return the sums of all ranks' messages; see `StepMetrics.message`.

        The all-reduce is after the backward. So if the step fails on all ranks, in different
        microbatches, no rank has started a collective that others have not.
        """
        return start_all_reduce(self.metrics.message(self.size), self.group)()

    def _take_means(self) -> None:
        """Set the means of metrics, and rescale the gradients if the assumed count was wrong.

        ``.grad`` must hold the gradients of this step only.
        """
        if self.size == 1:
            self.metrics.raise_refused()
            return
        self.metrics.receive(self._sums(), self.group)
        self.metrics.spoil(self.metrics.replica.differs_on_device(self.group))
        divisor = self.metrics.total / self.loss_weights.global_total()
        if not isinstance(divisor, Tensor) and math.isclose(divisor, 1, rel_tol=1e-12):
            return  # sums of fractions may differ in the last bit
        gradients: list[Any] = [p.grad for p in self.module.parameters() if p.grad is not None]
        gradients = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
        for device, dtype in {(g.device, g.dtype) for g in gradients}:
            by = divisor
            if isinstance(divisor, Tensor):
                # A divisor of the same dtype takes one kernel. A count of 0 gives gradients of 0,
                # and 16 bits may have no number as small as `_LEAST`.
                is_wide = dtype.itemsize > 2
                by = divisor.new_empty((), dtype=dtype if is_wide else divisor.dtype)
                # With an offload_policy the gradients are on the CPU.
                by = torch.add(divisor, _LEAST if is_wide else divisor == 0, out=by).to(device)
            alike = [g for g in gradients if (g.device, g.dtype) == (device, dtype)]
            with torch.no_grad():
                torch._foreach_div_(alike, by)  # as optimizers do

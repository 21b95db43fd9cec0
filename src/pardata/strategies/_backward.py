"""`backward`: the gradient of the mean over the global batch, under every strategy."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from pardata.collectives._comm_errors import explain_comm_errors
from pardata.data._batch import is_empty
from pardata.data._microbatches import Microbatches
from pardata.environment._device import device_kinds
from pardata.environment._logger import get_logger
from pardata.environment._world import is_single_process, require_world, world
from pardata.model._grads_and_buffers import BufferSnapshot, StashedGradients, mark_gradients
from pardata.model._torch_internals import parameters_of, sync_batch_norms
from pardata.model._unwrap import is_parallel
from pardata.rng._rng_state import fork_rng, fork_torch_rng, next_batch_seed
from pardata.rng._seeds import microbatch_seed
from pardata.store._current_op import current_op
from pardata.strategies._forward import (
    check_forward,
    check_loss_fn,
    sum_terms,
    zero_backward,
)
from pardata.strategies._loss_weights import Count, LossWeights, Microbatch, positive
from pardata.strategies._step import Step, forbidden_in
from pardata.strategies._step_metrics import StepMetrics
from pardata.strategies._step_record import record_of, update_record
from pardata.strategies._wrap_model import find_strategy

_log = get_logger(__name__)

_Metrics = TypeVar("_Metrics")
Loss: TypeAlias = Tensor | Mapping[str, Tensor]  # or a dict of terms
LossFn: TypeAlias = Callable[[nn.Module, Any], Any]

_MISSING: Any = None  # the default, so that `backward(loss)` raises an error with a cure


@overload
def backward(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Loss],
    batch: Any,
    *,
    count: Count | None = None,
    scaler: GradScaler | None = None,
) -> Tensor: ...


@overload
def backward(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], tuple[Loss, _Metrics]],
    batch: Any,
    *,
    count: Count | None = None,
    scaler: GradScaler | None = None,
) -> tuple[Tensor, _Metrics]: ...


def backward(
    model: nn.Module,
    loss_fn: LossFn = _MISSING,
    batch: Any = _MISSING,
    *,
    count: Count | None = None,
    scaler: GradScaler | None = None,
) -> Any:
    """Add to ``.grad`` the gradient of the mean loss over the global batch, and return that loss.

    `backward` runs ``loss_fn(model, microbatch)`` and its backward for each microbatch of this
    rank, and synchronizes the ranks once. Each sample of the global batch has the same weight,
    under every strategy of `wrap_model`, also if local batches have unequal sizes. The same call
    accumulates over eight microbatches in one process, and runs one in each of eight processes.

    Like ``Tensor.backward`` it adds: what was in ``.grad`` before stays, and only the new gradient
    is averaged over the ranks. A parameter that no microbatch uses keeps its ``.grad``. If a step
    ends in an error, ``.grad`` stays as it was; buffers may have changed. If `loss_fn` fails on one
    rank, the other ranks wait until that process ends, and then raise an error. Do not catch an
    error that only some ranks raise: the next collective would hang, or, in another step of
    `Microbatches`, raise on all ranks. Do not leave gradients of a ``loss.backward()`` under
    ``no_sync()`` in ``.grad``: no later step reduces them.

    `backward` seeds PyTorch's default generators for each microbatch, and restores them afterwards.
    With `Microbatches` the seed depends on the run's seed, the epoch, the step, the microbatch, and
    the number of calls with this batch. So dropout masks do not depend on the world size. With any
    other batch the seed depends on the run's seed, the rank, and the number of calls. The run's
    seed is the seed of `seed_everything`. Without that it is the loader's seed for `Microbatches`,
    else ``torch.initial_seed()``.

    Collective, except under ``"none"`` and ``"dp"``. In a single process it is gradient
    accumulation. In a model's first step `backward` warns if all ranks have the same samples, as
    they have with a plain ``DataLoader``. Loss, counts and metrics travel after the backward, or
    with a small model's gradients. It never waits for a GPU.

    Args:
        model: what `wrap_model` returned. The loss must train nothing else. If `loss_fn` runs other
            models, freeze them, or detach their outputs, or hold all in one module and wrap that.
            For a GAN, call ``discriminator.requires_grad_(False)`` before the generator's step.
            Call ``unwrap`` on other models with buffers in training mode. Under ``"fsdp"`` their
            buffers become those of rank 0.
        loss_fn: runs ``model`` and returns the mean over the samples of the microbatch, a tensor of
            one element. With `count` it is the mean over what that counts: for tokens, the sum of
            their losses divided by their number. It may also return ``(loss, metrics)``. Metrics
            are numbers and tensors, nested in dicts, lists and tuples, and means as well: an
            accuracy, the parts of a loss. A tensor has at most 10,000 elements. `Mean` is a metric
            with a denominator, of any size. With `Microbatches` it must call no collective,
            `all_gather` included, because ranks may run different numbers of microbatches.
        batch: the `Microbatches` of a loader or, except under ``"exact"``, one microbatch of any
            kind. For what a loader yielded, the number of samples is how many the loader read for
            it. For any other batch, also a slice of one, it is the length of the first tensor, or
            of a list of dicts or objects.
        count: returns the weight of a microbatch in place of its number of samples, for example its
            number of tokens, 0 or more. The loss of a microbatch that counts 0 is ignored, even if
            it is NaN. If `loss_fn` returns a dict of terms, `count` returns a dict with a number
            for each. The loss is then the sum of the terms, each weighted by its count, and metrics
            are weighted by samples. Pass it if a ``collate_fn`` leaves samples out, or if a batch
            does not show how many samples it has. It costs a small collective, which runs during
            the forward.
        scaler: scales the losses before their backward, but not the loss that is returned. You
            still call its ``unscale_``, ``step`` and ``update``.

    Returns:
        The mean loss over the global batch, without dimensions, detached, at least float32, the
        same on every rank. If `loss_fn` returned metrics, the loss and the means of the metrics,
        weighted like the loss. A tensor stays a tensor, of its floating dtype or the default one. A
        number becomes a float; it is read from the GPU, which waits.

    Raises:
        TypeError: `model` is no module, or the loss is no tensor of one element. Or a metric is no
            number, has a row for each sample, or is too large. Or the number of samples of `batch`
            is unclear.
        ValueError: a `count` is negative or not finite, all counts are 0, or the model is under
            ``no_sync()``.
        RuntimeError: `loss_fn` did not run `model` (one process checks that in the first step), or
            the loss trains a parameter outside of `model`. Or `loss_fn` calls a collective, or runs
            another wrapped model that would change its buffers. Or a parameter has a
            ``register_post_accumulate_grad_hook``, which would see a part of the gradient. Or
            `backward` is called under autocast. Or, under ``"ddp"``, parameters were added,
            exchanged or converted since `wrap_model`. Or, under ``"fsdp"``, a backward has made
            gradients that no rank has reduced. Or, under ``"exact"``, a forward has changed a
            floating-point buffer that no norm owns; other strategies warn of it.
            Or ranks differ: in the step, the structure of metrics, the modes (``train()``,
            ``eval()``), the trained parameters, the run's seed, or the weights. Weights are
            compared in steps 1, 2, 4 … 32 of a model and in each 64th, under ``"ddp"`` and
            ``"exact"``. The error names what differs. On a GPU it comes in the first step only. In
            later steps `backward` returns NaN for the loss and the metrics, because it does not
            wait for the GPU.

    >>> import torch
    >>> net, x = nn.Linear(1, 1), torch.arange(6.0).view(6, 1)
    >>> loss = backward(net, lambda model, x: model(x).square().mean(), x)
    >>> torch.allclose(loss, net(x).square().mean())
    True
    """
    if any(map(torch.is_autocast_enabled, device_kinds())) and torch.is_autocast_cache_enabled():
        msg = "`backward` must run outside of autocast: put `with torch.autocast(…)` into `loss_fn`"
        raise RuntimeError(msg)
    # In a single process a model is checked only in its first step.
    simple = count is None and is_single_process() and callable(loss_fn)
    if (
        simple
        and record_of(model).is_single
        and (not isinstance(batch, Microbatches) or len(batch) == 1)
    ):
        return _single(model, loss_fn, batch, scaler)
    check_loss_fn(loss_fn)
    step = _step_of(model, batch, scaler)
    step.loss_weights = LossWeights.of(batch, count, step)
    with explain_comm_errors("backward", batch), step.synchronized():
        for one in step.loss_weights.microbatches:
            current_op.heartbeat()
            with step.microbatch(one), fork_torch_rng(_seed(batch, one.number)):
                (_run if one.count else _run_placeholder)(step, model, loss_fn, one)
    means = step.metrics.result()
    _mark_done(model, batch, step.layer, {**step.found, "structures": step.metrics.structures})
    return means


def _single(model: nn.Module, loss_fn: LossFn, batch: Any, scaler: GradScaler | None) -> Any:
    """Run a step of one microbatch in a single process, in which it is the global batch."""
    first, microbatch = (batch.first, batch[0]) if isinstance(batch, Microbatches) else (0, batch)
    if is_empty(microbatch):
        positive(0)
    with StashedGradients(parameters_of(model)), fork_torch_rng(_seed(batch, first)):
        with forbidden_in(batch):
            returned = loss_fn(model, microbatch)
        metrics = StepMetrics(model)
        loss = metrics.add(returned, 1, microbatch)
        metrics.raise_refused()
        (loss if scaler is None else scaler.scale(loss)).backward()
    means = metrics.result()
    _mark_done(model, batch, model, {"structures": metrics.structures})
    return means


def _seed(batch: Any, number: int) -> int:
    return microbatch_seed(batch, number) if isinstance(batch, Microbatches) else next_batch_seed()


def _mark_done(model: nn.Module, batch: Any, layer: nn.Module, found: dict[str, Any]) -> None:
    """Record a successful call: the next one with these microbatches has other seeds."""
    update_record(layer, found)
    mark_gradients(model)
    if isinstance(batch, Microbatches):
        batch.calls += 1


def _step_of(model: nn.Module, batch: Any, scaler: GradScaler | None) -> Step:
    """Return the step of the model's strategy; warn or raise if no strategy synchronizes it."""
    strategy, layer = find_strategy(model)
    if not record_of(layer).is_checked:  # detecting a launcher takes 10 % of a small model's step
        require_world("backward")
    step = strategy.step(model, layer, scaler, batch)
    _check_batch_norms(step, batch)
    if is_single_process() or step.size > 1:
        return step
    name = type(model).__name__
    if is_parallel(step.module):
        raise ValueError(f"`model` must be wrapped as a whole, but {name} only has a wrapped part")
    what = f"no strategy keeps the replicas of {name} equal: each of {world().size} ranks trains"
    _log.warning("%s its own; pass what wrap_model returned", what, ranks=[0], once=True)
    return step


def _check_batch_norms(step: Step, batch: Any) -> None:
    """Raise for `Microbatches` with SyncBatchNorm, which would normalize only a few at a time."""
    is_cut = step.size > 1 and isinstance(batch, Microbatches)
    if is_cut and any(norm.training for norm in sync_batch_norms(step.module)):
        msg = "`batch` must not be Microbatches for a model with SyncBatchNorm, which needs the "
        msg += "global batch: leave out microbatch_size or sync_batchnorm"
        raise ValueError(msg)


def _forward(
    step: Step, model: nn.Module, loss_fn: LossFn, microbatch: Microbatch
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of a microbatch, and the outputs of the model if they are needed later."""
    keeps = not microbatch.count or len(microbatch.counts) > 1
    with check_forward(model, keeps=keeps) as outputs, step.running():
        returned = loss_fn(model, microbatch.data)
    returned = sum_terms(returned, microbatch, step.loss_weights, outputs)
    loss = step.metrics.add(returned, microbatch.count, microbatch.data)
    step.check(loss)
    step.loss_weights.global_total()  # raises on all ranks, before a backward
    step.end_forward(microbatch)
    return loss, outputs


def _run(step: Step, model: nn.Module, loss_fn: LossFn, microbatch: Microbatch) -> None:
    """Run the forward and backward of a microbatch that counts."""
    loss = _forward(step, model, loss_fn, microbatch)[0]  # frees the outputs
    # `Step.backward` multiplies the loss by this weight. If the total is only assumed,
    # `DistributedStep._take_means` divides the gradients once more.
    step.backward(loss, microbatch.count / step.loss_weights.global_total())


def _run_placeholder(
    step: Step, model: nn.Module, loss_fn: LossFn, placeholder: Microbatch
) -> None:
    """Run the forward and backward of a placeholder, whose gradients are zeros."""
    module = step.module
    # SyncBatchNorm includes the placeholder in its statistics, so its buffers stay, and its
    # gradient is not zero.
    shared = [norm for norm in sync_batch_norms(module) if norm.training]
    others = (part for part in module.modules() if part not in shared)
    # Around the backward too, in which checkpointed modules run again.
    with BufferSnapshot(others), fork_rng():
        loss, outputs = _forward(step, model, loss_fn, placeholder)
        if step.scaler is not None:
            step.scaler.scale(loss.detach())  # a scaler requires one call of `scale`
        zero_backward(outputs, loss, everywhere=not shared)

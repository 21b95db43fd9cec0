"""backward: the gradient of the mean over the whole global batch, whatever the strategy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from pardata.collective._explanation import explained
from pardata.data._batch import tensors_of
from pardata.data._microbatches import Microbatches
from pardata.gradient._count import Count, Pieces
from pardata.gradient._exact_step import ExactStep
from pardata.gradient._step import ReplicatedStep, ShardedStep, Step
from pardata.model._batch_norm import is_synchronised
from pardata.model._buffers import kept_buffers
from pardata.model._strategy import DDP, DP, EXACT, FSDP, NONE, Replica, Strategy, replica_of
from pardata.model._unwrap import is_parallel
from pardata.ranks._logger import get_logger
from pardata.ranks._world import World, require_world
from pardata.seeds._generators import kept_generators

_log = get_logger(__name__)

LossFn = Callable[[nn.Module, Any], Tensor]


def backward(
    model: nn.Module, loss_fn: LossFn, batch: Any, *, count: Count | None = None
) -> Tensor:
    """Add to ``.grad`` the gradient of the mean loss over the global batch, and return that loss.

    Runs ``loss_fn(model, microbatch)``, a mean over the samples of the microbatch, and its backward
    for each microbatch, and synchronises once. Each sample of the global batch counts alike,
    however unevenly ranks and microbatches share them, under every strategy of `wrap_model`: the
    same call accumulates over eight microbatches in one process, and runs one in each of eight. As
    ``Tensor.backward`` it adds: what was in ``.grad`` before is counted once and not reduced again,
    and a parameter that no microbatch uses keeps its ``.grad``. Gradients of a ``loss.backward()``
    under ``no_sync()`` must not be in ``.grad``: nobody would reduce them.

    Collective, but for ``"none"`` and ``"dp"``. In a single process it is gradient accumulation.

    Args:
        model: as `wrap_model` returned it. Other trainable models that `loss_fn` runs must be
            frozen: nobody synchronises their gradients.
        loss_fn: runs ``model`` and returns a mean: a tensor of one element. With a gradient scaler
            it returns the scaled loss.
        batch: the `Microbatches` of a loader; or, but for ``"exact"``, one microbatch of any kind,
            whose samples are the rows of its first tensor, or the items of lists with one for each
            sample, as of images and targets; of what may be read in several ways, a `count` tells.
        count: returns what a microbatch counts for instead of its samples, its tokens say: an
            integer from 0 up. The loss of one that counts 0 is not looked at, be it NaN. Costs a
            small collective, as does a `batch` that is no `Microbatches`.

    Returns:
        The mean loss over the global batch, without dimensions and detached, the same on every
        rank.

    Raises:
        TypeError, ValueError: for what is no model; for a `batch` of which nobody can tell how many
            samples it has; for a `count` that is no integer from 0 up, and counts that are all 0;
            for a loss that is no tensor of one element; under ``no_sync()``.
        RuntimeError: where `loss_fn` did not run `model`.

    >>> net, x = nn.Linear(1, 1), torch.arange(6.0).view(6, 1)
    >>> loss = backward(net, lambda model, x: model(x).square().mean(), x)
    >>> torch.allclose(loss, net(x).square().mean())
    True
    """
    here = require_world("backward")
    replica = replica_of(model)
    step = _STEPS[replica.strategy](replica, model, batch, here)
    _check_equally_many(replica.module, batch, step.size)
    if here.size > 1 and step.size == 1:
        _check_alone(model, replica.module, here)
    pieces = Pieces.of(batch, count, step)
    with explained("backward", batch):
        with _gradients_aside(replica.module), step.whole(pieces):
            for left, piece in zip(reversed(range(len(pieces.own))), pieces.own, strict=True):
                with step.around(piece, last=left == 0):
                    if piece.count:
                        with _forward_of(model):
                            loss = _checked(loss_fn(model, piece.microbatch))
                        step.run(loss, piece.count / pieces.total())
                    else:
                        _take_part(model, replica.module, loss_fn, piece.microbatch, pieces)
            if not pieces.own:
                pieces.total()  # raises where the others do
        return step.loss()


# What a step does under each strategy. Here, and no part of the strategies themselves: those stand
# in the room of models, which comes before this one and knows neither steps nor batches.
_STEPS: dict[Strategy, Callable[[Replica, nn.Module, Any, World], Step]] = {
    NONE: lambda replica, *_: Step(replica.module),
    DP: lambda replica, *_: Step(replica.module),
    DDP: lambda replica, *_: ReplicatedStep(replica.module, replica.wrapper),
    FSDP: lambda replica, *_: ShardedStep(replica.wrapper),
    EXACT: lambda replica, model, batch, here: ExactStep(model, replica.wrapper, batch, here.size),
}


def _check_equally_many(module: nn.Module, batch: Any, size: int) -> None:
    """Refuse a step in which a stand-in would enter the statistics that all ranks share."""
    if not isinstance(batch, Microbatches) or len(batch.counts) % size == 0:
        return
    if any(is_synchronised(part) and part.training for part in module.modules()):
        raise ValueError(
            f"`batch` must be equally many microbatches on each of the {size} ranks for a model "
            f"with SyncBatchNorm, whose forwards they run together, but is {len(batch.counts)} in "
            f"all: pass make_loader a `batch_size` that is a multiple of `microbatch_size` times "
            f"the number of ranks, with drop_last=True, or leave out sync_batchnorm"
        )


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"one of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        msg = (
            f"`loss_fn` must return a tensor of one element, but returned {what}: take the mean "
            f"over the samples"
        )
        raise ValueError(msg) if isinstance(loss, Tensor) else TypeError(msg)
    return loss.reshape(())


def _take_part(
    model: nn.Module, module: nn.Module, loss_fn: LossFn, microbatch: Any, pieces: Pieces
) -> None:
    """Run forward and backward for the other ranks' sake, and leave nothing behind but zeros."""
    # Statistics over all ranks are made of what counts nothing too, and have a gradient by it.
    shared = [part for part in module.modules() if is_synchronised(part) and part.training]
    outputs: list[Tensor] = []
    # The backward too: parts that are checkpointed run again in it.
    with kept_buffers(module, but_of=shared), kept_generators(next(module.parameters()).device):
        with _forward_of(model, lambda output: outputs.extend(tensors_of(output))):
            loss = loss_fn(model, microbatch)
        pieces.total()
        _add_zeros(outputs, loss, everywhere=not shared)


def _add_zeros(outputs: list[Tensor], loss: Any, *, everywhere: bool) -> None:
    """Run a backward from 0 times `outputs`, which adds zeros where that of `loss` would add.

    Zeros `everywhere`, or what the backward makes of them.
    """
    trained = [output for output in outputs if output.requires_grad]
    # Not from the loss, which may be NaN, or no function of the outputs where nothing counts; but
    # from what it is made of, as FSDP needs gradients of the same parameters on all ranks.
    made_of = _edges([loss] if isinstance(loss, Tensor) and loss.requires_grad else [])
    used = [output for output in trained if get_gradient_edge(output)[:2] in made_of]
    starts = used or trained or [loss]
    # 0 times what is NaN inside the model is NaN as well, a loss that it computes itself say.
    ends = {node for node, _ in _edges(starts) if hasattr(node, "variable")}
    hooks = [node.register_prehook(_zeros) for node in ends if everywhere]
    try:
        torch.autograd.backward(starts, [torch.zeros_like(start) for start in starts])
    finally:
        for hook in hooks:
            hook.remove()


# The result of a node of autograd's graph, and which of its results it is.
_Edge = tuple[Node, int]


def _edges(tensors: list[Tensor]) -> set[_Edge]:
    """Return all that `tensors` are made of, down to the leaves, in autograd's graph."""
    found = set[_Edge]()
    ahead: list[_Edge] = [get_gradient_edge(tensor)[:2] for tensor in tensors]
    while ahead:
        edge = ahead.pop()
        if edge not in found:
            found.add(edge)
            ahead.extend((node, number) for node, number in edge[0].next_functions if node)
    return found


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else torch.zeros_like(g) for g in gradients)


@contextmanager
def _forward_of(model: nn.Module, see: Callable[[Any], object] = lambda _: None) -> Iterator[None]:
    """Show to `see` what each training forward of `model` in this block returns.

    Raises:
        RuntimeError: where there was none.
    """
    ran = False

    def note(_module: nn.Module, _args: object, output: Any) -> None:
        nonlocal ran
        if torch.is_grad_enabled():
            ran = True
            see(output)

    hook = model.register_forward_hook(note)
    try:
        yield
    finally:
        hook.remove()
    if not ran:
        raise RuntimeError(
            "`loss_fn` must run the model that it is given, with gradients, but did not, so that "
            "none would be synchronised: call model(…), and not a module inside it"
        )


@contextmanager
def _gradients_aside(module: nn.Module) -> Iterator[None]:
    """Put away the gradients that are there, and add them to the new ones after the block."""
    # Copies: under DDP a gradient may be a part of the memory that the next one is reduced in.
    before = [(p, p.grad.clone()) for p in module.parameters() if p.grad is not None]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient


def _check_alone(model: nn.Module, module: nn.Module, here: World) -> None:
    """Say that nobody synchronises the model, or refuse it where a part of it is synchronised."""
    name = type(model).__name__
    if is_parallel(module):
        raise ValueError(
            f"`model` must be what wrap_model returned, but this {name} only holds a wrapped "
            f"module, and nobody would synchronise the rest: wrap once, at the outside"
        )
    what = f"no strategy keeps the replicas of {name} equal: each of the {here.size} ranks trains"
    _log.warning("%s its own; pass what wrap_model returned", what, ranks=[0], once=True)

"""The forward of a step: which step runs, checks of models and arguments, terms, zeros."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from pardata._validation import type_with_article
from pardata.data._batch import iter_tensors
from pardata.model._torch_internals import direct_tensors, uncompiled
from pardata.strategies._loss_weights import LossWeights, Microbatch

# The steps that run now, the innermost one last.
_active: list[Any] = []


@contextmanager
def active_step(step: object) -> Iterator[None]:
    """Mark a step as running in the block."""
    _active.append(step)
    try:
        yield
    finally:
        _active.pop()


def running_step() -> Any:
    """Return the step that runs now, the innermost one, or None."""
    return _active[-1] if _active else None


def active_model() -> nn.Module | None:
    """Return the layer of the model whose step runs now, the innermost one, or None."""
    if torch.compiler.is_compiling():
        return _uncompiled_active_model()
    return _active[-1].layer if _active else None


_uncompiled_active_model = uncompiled(active_model)


@uncompiled
def check_nested(module: nn.Module) -> None:
    """Raise for a wrapped module in the step of another model, if its forward may write buffers.

    Ranks may run it unequally often, so its wrapper sends nothing, and buffers would differ.
    """
    if any(part.training and direct_tensors(part)[1] for part in module.modules()):
        name = type(module).__name__
        msg = "a wrapped model must have no buffers in training mode in the `loss_fn` of another, "
        msg += f"but {name} has: call unwrap(model) there, or model.eval() before"
        raise RuntimeError(msg)


def check_loss_fn(loss_fn: object) -> None:
    """Raise for the arguments of ``loss.backward()``, and for a loss function."""
    what = getattr(loss_fn, "__name__", type_with_article(loss_fn))
    if not callable(loss_fn):
        msg = f"`loss_fn` must be a function, but is {what}: call backward(model, loss_fn, batch)"
        raise TypeError(msg)
    modules = {getattr(loss_fn, "__module__", ""), *(t.__module__ for t in type(loss_fn).__mro__)}
    if modules & {"torch.nn.functional", "torch.nn.modules.loss"}:
        msg = f"`loss_fn` must run the model, but is {what}, which takes outputs and targets: "
        msg += "write def loss_fn(model, batch): return criterion(model(batch[0]), batch[1])"
        raise TypeError(msg)


@contextmanager
def check_forward(model: nn.Module, *, keeps: bool) -> Iterator[list[Tensor]]:
    """Context manager: raises if `model` did not run with gradients; yields its output tensors.

    The list is empty unless it `keeps` them.

    Raises:
        RuntimeError: no training forward ran in the block.
    """
    ran, outputs = False, list[Tensor]()

    def note(_module: nn.Module, _args: object, output: Any) -> None:
        nonlocal ran
        if torch.is_grad_enabled():
            ran = True
            outputs.extend(iter_tensors(output) if keeps else ())

    hook = model.register_forward_hook(note)
    try:
        yield outputs
    finally:
        hook.remove()
    if not ran:
        msg = "`loss_fn` must run `model` with gradients, but did not: call model(…), not its parts"
        raise RuntimeError(msg)


def zero_backward(outputs: list[Tensor], loss: Any, *, everywhere: bool) -> None:
    """Run a backward that adds zeros to the gradients that a backward of `loss` would change.

    With `everywhere` all leaves get zeros. Otherwise the gradients of `outputs` are zeros, and the
    backward continues from these.
    """
    trained = [output for output in outputs if output.requires_grad]
    # Through the full graph of the loss, as on the other ranks: FSDP's all-gathers in it are
    # collective, and an error occurs in the same microbatch on all ranks.
    made_of = _edges([loss])
    used = [output for output in trained if get_gradient_edge(output)[:2] in made_of]
    starts = [loss] if used else trained or [loss]
    # Hooks on the leaves, because 0 times NaN inside the model is NaN, as in a loss that it
    # computes.
    ends = {node for node, _ in _edges(starts) if hasattr(node, "variable")}
    hooks = [node.register_prehook(_zeros) for node in ends if everywhere]
    # SyncBatchNorm gives its parameters no gradient without rows, and FSDP would then reduce less
    # than on other ranks.
    starts += [] if everywhere else [node.variable for node in ends]
    # Also at the outputs, because 0 times a NaN loss is NaN.
    hooks += [output.register_hook(torch.zeros_like) for output in used]
    try:
        torch.autograd.backward(starts, [torch.zeros_like(start) for start in starts])
    finally:
        for hook in hooks:
            hook.remove()


# A node of autograd's graph, and the index of one of its outputs.
_Edge = tuple[Node, int]


def _edges(tensors: list[Tensor]) -> set[_Edge]:
    """Return all edges of autograd's graph from which `tensors` are computed."""
    found = set[_Edge]()
    ahead: list[_Edge] = [get_gradient_edge(t)[:2] for t in tensors if t.requires_grad]
    while ahead:
        edge = ahead.pop()
        if edge not in found:
            found.add(edge)
            ahead.extend((node, number) for node, number in edge[0].next_functions if node)
    return found


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the leaves that get a gradient in the backward of `loss`."""
    return [node.variable for node, _ in _edges([loss]) if hasattr(node, "variable")]


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else torch.zeros_like(g) for g in gradients)


def sum_terms(
    returned: Any, microbatch: Microbatch, loss_weights: LossWeights, outputs: list[Tensor]
) -> Any:
    """Return the result of `loss_fn`, with a dict of terms replaced by their weighted sum.

    Each term is weighted by its count. The caller multiplies the loss by the microbatch's fraction
    of the step, so the sum is divided by that.

    Args:
        returned: the result of `loss_fn`.
        microbatch: its microbatch.
        loss_weights: the counts of the step.
        outputs: the output tensors of the model.
    """
    totals = {name: total for name, total in loss_weights.totals().items() if name}
    if not totals:
        return returned
    has_metrics = type(returned) is tuple and len(returned) == 2
    terms = returned[0] if has_metrics else returned
    if not isinstance(terms, Mapping) or terms.keys() != totals.keys():
        shown = [*terms] if isinstance(terms, Mapping) else type(terms).__name__
        raise TypeError(
            f"`loss_fn` must return a dict with keys {[*totals]}, as `count`, but returned {shown}"
        )
    losses = {name: scalar_loss(terms[name]) for name in totals}
    if microbatch.count:
        part, counts = microbatch.count / loss_weights.global_total(), microbatch.counts
        # 0 times NaN is NaN, so a term that counts 0 is left out. Zeros of the outputs replace it,
        # because DDP waits for the gradients of all trained parameters.
        counted = [losses[n] * (counts[n] / totals[n] / part) for n in totals if counts[n]]
        seen = outputs if len(counted) < len(totals) else []
        zeros = [(out.nan_to_num(0, 0, 0) * 0).sum() for out in seen if out.requires_grad]
        loss: Any = sum([*counted, *zeros])
    else:  # its backward adds only zeros
        loss = sum(losses.values())
    return (loss, returned[1]) if has_metrics else loss


def upcast(loss: Tensor) -> Tensor:
    """Return a loss in float32 or float64."""
    return loss if loss.dtype in (torch.float32, torch.float64) else loss.float()


def scalar_loss(loss: Any) -> Tensor:
    """Return a loss of one element with shape (); raise for anything else."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(()) if loss.ndim else loss
    must = "`loss_fn` must return a tensor of one element"
    if isinstance(loss, Tensor):
        raise ValueError(f"{must}, but returned one of shape {tuple(loss.shape)}: take the mean")
    raise TypeError(
        f"{must}, but returned {type_with_article(loss)}: return a mean over the samples "
        f"(output.loss), or (loss, metrics); for a dict let `count` return a number for each term"
    )

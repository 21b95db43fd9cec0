"""The backward of a microbatch that does not count: it adds zeros, for the other ranks' sake."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


def add_zeros(outputs: list[Tensor], loss: Any, *, everywhere: bool) -> None:
    """Run a backward from 0 times `outputs`, which adds zeros where that of `loss` would add.

    Zeros `everywhere`, or what the backward makes of them.
    """
    trained = [output for output in outputs if output.requires_grad]
    # Not from the loss, which may be NaN, or no function of the outputs where nothing counts; but
    # from what it is made of, as FSDP needs gradients of the same parameters on all ranks.
    made_of = _edges([loss] if isinstance(loss, Tensor) and loss.requires_grad else [])
    used = [output for output in trained if _edges_at([output])[0] in made_of]
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
    ahead = _edges_at(tensors)
    while ahead:
        edge = ahead.pop()
        if edge not in found:
            found.add(edge)
            ahead.extend((node, number) for node, number in edge[0].next_functions if node)
    return found


def _edges_at(tensors: list[Tensor]) -> list[_Edge]:
    edges = map(get_gradient_edge, tensors)
    return [(edge.node, edge.output_nr) for edge in edges]


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else torch.zeros_like(g) for g in gradients)

"""What runs at the end of a backward, and what autograd keeps under private names."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# ruff: noqa: SLF001  # `queue_callback` can go when pytorch/pytorch#66199 is done


def after_backward(
    outputs: Iterable[Tensor], action: Callable[[], None], *, otherwise: bool = True
) -> None:
    """Run `action` at the end of the first backward through any of the outputs of a forward.

    If none of them can have a backward, at once, or not at all.
    """
    waiting = [action]

    def begin(_gradient: Tensor) -> None:
        if waiting:
            at_end_of_backward(waiting.pop())

    ends = [tensor for tensor in outputs if tensor.requires_grad]
    for tensor in ends:
        tensor.register_hook(begin)
    if not ends and otherwise:
        action()


def at_end_of_backward(action: Callable[[], None]) -> None:
    """Run `action` when the backward that runs now has ended, after what was queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(action)  # as DDP itself does


def in_backward() -> bool:
    """Return whether a backward runs, as for a checkpointed part, which runs again in it."""
    return torch._C._current_graph_task_id() >= 0

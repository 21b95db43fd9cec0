"""What ``nn.Module``, autograd and ``torch.compile`` keep under private names.

By public methods `modules_and_parameters` takes four times as long. No public method reads or sets
the versions in a state (pytorch/pytorch#75287), or says how ``torch.compile`` compiled a module.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# ruff: noqa: SLF001  # see above; `queue_callback` can go when pytorch/pytorch#66199 is done

BatchNorm: TypeAlias = _BatchNorm  # the class of them all, which a user may have subclassed
# As torch.compiler.disable, which imports all of dynamo at once: pytorch/pytorch#104317.
uncompiled = torch._disable_dynamo


def modules_and_parameters(module: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """Return the parts of a module and their parameters."""
    parts, seen = [module], {module}
    for part in parts:
        for child in part._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                parts.append(child)
    return parts, [p for part in parts for p in part._parameters.values() if p is not None]


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    return modules_and_parameters(module)[1]


def name_of(parameter: Tensor, named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the name that a parameter has among those that are `named`."""
    return next((name for name, one in named if one is parameter), "a former parameter")


def direct_tensors(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return where a module holds its parameters and its buffers, without those of its children."""
    return part._parameters, part._buffers


def versions_of(state: Any) -> dict[str, dict[str, Any]]:
    """Return by which version of each module a state was written, for one that says so."""
    versions: dict[str, dict[str, Any]] = getattr(state, "_metadata", {})
    return versions


def set_versions(state: Any, versions: Mapping[str, Any]) -> None:
    state._metadata = versions


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


def fail_past_recompile_limit() -> None:
    """Fail at dynamo's limit of recompilations, in the whole process; see ``torch._dynamo.config``.

    Past the limit dynamo runs uncompiled what it has not met.
    """
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def is_compiled_in_place(part: nn.Module) -> bool:
    """Return whether ``part.compile()`` was called."""
    return part._compiled_call_impl is not None


def has_dynamic_sizes(context: Any) -> bool:
    """Return whether ``torch.compile``, which made this context, may compile for several sizes."""
    return getattr(context, "_dynamic", None) is not False


def sync_batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return the SyncBatchNorms of a module: each forward of one in training is collective."""
    return [part for part in module.modules() if isinstance(part, nn.SyncBatchNorm)]

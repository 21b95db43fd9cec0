"""Access to private state of ``nn.Module``, autograd and ``torch.compile``, in one file.

By public methods `modules_and_parameters` takes four times as long. No public method reads or sets
the versions in a state (pytorch/pytorch#75287), or says how ``torch.compile`` compiled a module.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

# ruff: noqa: SLF001  # see above; `_execution_engine` is for torch before 2.15

BatchNorm: TypeAlias = nn.modules.batchnorm._BatchNorm  # the base class of all batch norms
# As torch.compiler.disable, which imports all of dynamo: can go with pytorch/pytorch#104317.
uncompiled = torch._disable_dynamo


def modules_and_parameters(module: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """Return all modules of `module` and their parameters."""
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
    """Return the name of a parameter in `named`."""
    return next((name for name, one in named if one is parameter), "a former parameter")


def name_of_hooked(module: nn.Module) -> str | None:
    """Return the name of a parameter with a user's hook on its accumulated gradient, if any."""
    for name, parameter in module.named_parameters():
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            home = str(getattr(hook, "func", hook).__module__)
            if not home.startswith(("pardata.", "torch.nn.parallel.")):
                return name
    return None


def direct_tensors(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dicts of the direct parameters and direct buffers of a module."""
    return part._parameters, part._buffers


def has_comm_hook(layer: nn.Module) -> bool:
    """Return whether a user has given DDP a communication hook."""
    return bool(getattr(layer, "_comm_hooks", ()))


def write_count(tensor: Tensor | None) -> int:
    """Return how often a tensor, if any, has been written in place, except by ``.data``."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def versions_of(state: Any) -> dict[str, dict[str, Any]]:
    """Return the metadata of a state dict: the version of each module by path; may be empty."""
    versions: dict[str, dict[str, Any]] = getattr(state, "_metadata", {})
    return versions


def set_versions(state: Any, versions: Mapping[str, Any]) -> None:
    state._metadata = versions


def at_end_of_backward(action: Callable[[], None]) -> None:
    """Run `action` at the end of the current backward, after callbacks queued earlier."""
    is_public = torch.__version__ >= "2.15"
    engine: Any = torch.autograd.graph if is_public else torch.autograd.Variable._execution_engine
    engine.queue_callback(action)


def fail_past_recompile_limit() -> None:
    """Let dynamo raise at its limit of recompilations, in the whole process.

    By default it would run new sizes uncompiled past the limit; see ``torch._dynamo.config``.
    """
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def is_compiled_in_place(part: nn.Module) -> bool:
    """Return whether ``part.compile()`` was called."""
    return part._compiled_call_impl is not None


def has_dynamic_sizes(context: Any) -> bool:
    """Return whether this context of ``torch.compile`` may compile one kernel for several sizes."""
    return getattr(context, "_dynamic", None) is not False


def sync_batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return the SyncBatchNorms of a module, whose forwards in training mode are collective."""
    return [part for part in module.modules() if isinstance(part, nn.SyncBatchNorm)]

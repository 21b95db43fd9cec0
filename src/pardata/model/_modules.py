"""What ``nn.Module`` keeps under private names.

Its methods take four times as long for `walked`. No public one reads or sets the versions in a
state (pytorch/pytorch#75287).
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# ruff: noqa: SLF001  # see above

BatchNorm: TypeAlias = _BatchNorm  # the class of them all, which a user may have subclassed


def walked(module: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """Return the parts of a module and their parameters."""
    parts, seen = [module], {module}
    for part in parts:
        for child in part._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                parts.append(child)
    return parts, [p for part in parts for p in part._parameters.values() if p is not None]


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    return walked(module)[1]


def name_of(parameter: Tensor, named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the name that a parameter has among those that are `named`."""
    return next((name for name, one in named if one is parameter), "a former parameter")


def own_tensors(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return where a module holds its parameters and its buffers, without those of its children."""
    return part._parameters, part._buffers


def versions_of(state: Any) -> dict[str, dict[str, Any]]:
    """Return by which version of each module a state was written, for one that says so."""
    versions: dict[str, dict[str, Any]] = getattr(state, "_metadata", {})
    return versions


def set_versions(state: Any, versions: Mapping[str, Any]) -> None:
    state._metadata = versions

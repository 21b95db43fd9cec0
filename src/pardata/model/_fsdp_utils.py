"""Internals of `fully_shard`: placement, resharding, reset of its state after an error."""

from typing import Any

import torch
from torch import Tensor, nn

from pardata.data._batch import iter_tensors
from pardata.model._grads_and_buffers import StashedGradients
from pardata.model._torch_internals import direct_tensors, uncompiled

# ruff: noqa: SLF001  # can go with a torch that has `reset_iter_state` (2.15):
# pytorch/torchtitan#1329


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device) -> dict[Tensor, Tensor]:
    """Move all tensors that are not sharded to a device, with new memory if they are on meta.

    Return the tensors that were replaced, with the new ones. Modules that share a tensor share the
    new one; PyTorch's ``to_empty()`` would make several.
    """
    made: dict[Tensor, Tensor] = {}
    held = [h for part in module.modules() for h in direct_tensors(part)]
    for holder, name, tensor in [(h, name, t) for h in held for name, t in h.items()]:
        if tensor is None or hasattr(tensor, "device_mesh") or tensor.device == device:
            continue
        if tensor not in made:
            moved = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
            if torch._has_compatible_shallow_copy_type(tensor, moved):
                tensor.data = moved
                continue
            is_parameter = isinstance(tensor, nn.Parameter)
            made[tensor] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
        holder[name] = made[tensor]
    return made


@uncompiled
def reshard_hook(module: nn.Module, _args: object, output: object) -> None:
    """Forward hook: reshard the parameters after a forward whose output needs no gradient.

    PyTorch reshards in the backward, which does not follow. An optimizer made in between would get
    the unsharded parameters, and train nothing.
    """
    if not any(tensor.requires_grad for tensor in iter_tensors(output)):
        reshard(module)


def reshard(module: nn.Module) -> None:
    """Reshard all modules of `fully_shard`."""
    parts: list[Any] = [part for part in module.modules() if hasattr(part, "_get_fsdp_state")]
    for part in parts:
        part.reshard()


def reset_iter_state(module: nn.Module) -> None:
    """Reset the state of FSDP, which a forward or a backward outside of `backward` may have left.

    PyTorch's reset is for an iteration that failed, and drops ``.grad``. Here it stays.
    """
    with StashedGradients([parameter.sharded_param for parameter in _sharded(module)]):
        reset_after_error(module)


def reset_after_error(module: Any) -> None:
    """Drop all gradients and reset the state of FSDP after a failed step."""
    if not _states(module) or module._get_fsdp_state()._is_root is None:  # before the first forward
        return
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
    else:
        _reset_before_2_15(module)


def _reset_before_2_15(module: nn.Module) -> None:
    for parameter in _sharded(module):
        parameter.sharded_param.grad = parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
    for state, groups in _states(module):
        for one in (state, *groups):
            one._training_state = type(one._training_state).IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.post_forward_order.clear()
        for group in groups:
            group.wait_for_unshard()
            group._post_forward_indices.clear()
            group._partial_reduce_output = None
    reshard(module)


def unsharded_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the unsharded parameters, of which autograd makes gradients."""
    return [p._unsharded_param for p in _sharded(module) if hasattr(p, "_unsharded_param")]


def has_unreduced_gradients(module: nn.Module) -> bool:
    """Return whether a backward that failed, or did not synchronize, has left gradients."""
    found = [parameter.grad for parameter in unsharded_parameters(module)]
    found += [parameter.unsharded_accumulated_grad for parameter in _sharded(module)]
    found += [group._partial_reduce_output for _, groups in _states(module) for group in groups]
    return any(gradient is not None for gradient in found)


def _sharded(module: nn.Module) -> list[Any]:
    return [p for _, groups in _states(module) for group in groups for p in group.fsdp_params]


def _states(module: nn.Module) -> list[tuple[Any, list[Any]]]:
    parts: Any = [part for part in module.modules() if hasattr(part, "_get_fsdp_state")]
    states = [part._get_fsdp_state() for part in parts]
    name = "_fsdp_param_groups"  # an older torch has one group, and the name without the "s"
    groups = [getattr(s, name, None) or [getattr(s, name[:-1])] for s in states]
    return [(s, [g for g in some if g]) for s, some in zip(states, groups, strict=True)]

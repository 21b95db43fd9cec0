# ruff: noqa: PLR0917  # the arguments are torch's
"""Operators that CUDA has and the CPU has not, and the scattering of `nn.DataParallel`."""

import torch
from torch import library
from torch.nn.parallel import comm

_aten = library.Library("aten", "IMPL")


def register():
    for name, fn in OPERATORS.items():
        _aten.impl(name, fn, "PrivateUse1")
    for name, fn in COMMUNICATION.items():
        setattr(comm, name, _of_sim(fn, getattr(comm, name)))


# --- batch norm over several ranks, in float32


def _rows(x, values):
    """Return a value for each channel, as a shape that `x` broadcasts with."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


def _but_channels(x):
    return [dim for dim in range(x.dim()) if dim != 1]


def batch_norm_stats(x, eps):
    variance, mean = torch.var_mean(x.float(), _but_channels(x), correction=0)
    return mean, (variance + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    x, mean, invstd, running_mean, running_var, momentum, eps, counts
):
    counts = counts.view(-1, 1)
    total = counts.sum()
    whole = (mean * counts).sum(0) / total
    squares = (invstd.pow(-2) - eps + (mean - whole).square()) * counts
    variance = squares.sum(0) / total
    if running_mean is not None:
        running_mean.lerp_(whole.to(running_mean.dtype), momentum)
        unbiased = squares.sum(0) / (total - 1)
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return whole, (variance + eps).rsqrt()


def batch_norm_elemt(x, weight, bias, mean, invstd, eps):
    result = (x.float() - _rows(x, mean)) * _rows(x, invstd)
    if weight is not None:
        result = result * _rows(x, weight) + _rows(x, bias)
    return result.to(x.dtype)


def batch_norm_backward_reduce(grad, x, mean, invstd, weight, need_x, need_weight, need_bias):
    dims = _but_channels(x)
    grads = grad.float()
    total = grads.sum(dims)
    with_x = (grads * (x.float() - _rows(x, mean))).sum(dims)
    of_weight = (with_x * invstd).to(weight.dtype) if weight is not None else with_x * invstd
    of_bias = total.to(weight.dtype) if weight is not None else total.clone()
    return total, with_x, of_weight, of_bias


def batch_norm_backward_elemt(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, counts):
    count = counts.sum()
    centered = (x.float() - _rows(x, mean)) * _rows(x, invstd.square() * sum_dy_xmu / count)
    scale = invstd if weight is None else invstd * weight
    result = (grad.float() - _rows(x, sum_dy / count) - centered) * _rows(x, scale)
    return result.to(x.dtype)


OPERATORS = {
    fn.__name__: fn
    for fn in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    )
}


# --- `nn.DataParallel`: torch copies by functions that need NVIDIA's driver


def _of_sim(own, of_cuda):
    def chosen(tensors, *args, **options):
        first = tensors
        while not isinstance(first, torch.Tensor):
            first = first[0]
        is_ours = torch.accelerator.current_accelerator().type == "sim"
        return (own if is_ours else of_cuda)(tensors, *args, **options)

    return chosen


def _device(index):
    return torch.device("cpu" if index == "cpu" else f"sim:{torch.sim._index(index)}")


def broadcast_coalesced(tensors, devices, buffer_size=0):
    return [[tensor.to(_device(index)) for tensor in tensors] for index in devices]


def reduce_add_coalesced(inputs, destination=None, buffer_size=0):
    place = _device(destination)
    return tuple(sum(copy.to(place) for copy in copies) for copies in zip(*inputs, strict=True))


def scatter(tensor, devices=None, chunk_sizes=None, dim=0, streams=None, *, out=None):
    sizes = chunk_sizes or -(-tensor.size(dim) // len(devices))
    parts = tensor.split(sizes, dim)
    copies = []
    for index, part, stream in zip(devices, parts, streams or [None] * len(parts), strict=False):
        with torch.sim.stream(stream):
            copies.append(part.to(_device(index), non_blocking=True))
    return tuple(copies)


def gather(tensors, dim=0, destination=None, *, out=None):
    return torch.cat([tensor.to(_device(destination)) for tensor in tensors], dim)


COMMUNICATION = {
    fn.__name__: fn for fn in (broadcast_coalesced, reduce_add_coalesced, scatter, gather)
}

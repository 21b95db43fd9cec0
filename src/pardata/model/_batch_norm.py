"""Batch norm over the samples of all ranks, on CPUs, where PyTorch has none."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm


def is_synchronised(module: nn.Module) -> bool:
    """Whether it is a batch norm over all ranks, PyTorch's or ours."""
    own = getattr(module.forward, "func", None)
    return own is _over_all_ranks or isinstance(module, nn.SyncBatchNorm)


def with_synchronised_batch_norms(model: nn.Module, *, on_cpu: bool) -> nn.Module:
    """Return the model, with batch norms over all ranks.

    Args:
        model: in which there may be batch norms.
        on_cpu: whether one of them is to run on a CPU, which PyTorch's refuses.

    Raises:
        ValueError: names the first that does more than PyTorch's: being replaced it would lose it.
    """
    names = {module: name for name, module in model.named_modules()}
    plain = [m for m in names if isinstance(m, _BatchNorm) and not is_synchronised(m)]
    for module in plain:
        if getattr(module.forward, "__func__", None) is not _BatchNorm.forward:
            raise ValueError(
                f"`sync_batchnorm` must find batch norms with PyTorch's own forward, to replace "
                f"it, but `{names[module] or 'model'}` ({type(module).__name__}) has another: put "
                f"what it adds into a module next to an nn.BatchNorm1d, 2d or 3d"
            )
    if not on_cpu:
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted
    for module in plain:
        # The forward alone: class, parameters, hooks, the mode and whoever holds the module stay.
        vars(module)["forward"] = partial(_over_all_ranks, module)  # a method would not be pickled
    return model


def _over_all_ranks(norm: _BatchNorm, rows: Tensor) -> Tensor:
    """Be the forward of a batch norm: one collective in training, and one in its backward.

    Statistics are those of the samples of all ranks together, each counted once however unevenly
    they are shared, of none included. In evaluation, and where there is one process, it is the
    batch norm that it was.

    Sergey Ioffe and Christian Szegedy, "Batch Normalization", ICML 2015. The
    ranks' statistics are put together as in Chan, Golub and LeVeque, "Updating formulae and a
    pairwise algorithm for computing sample variances", 1979.
    """
    if not (norm.training and dist.is_initialized() and dist.get_world_size() > 1):
        return _BatchNorm.forward(norm, rows)
    norm._check_input_dim(rows)  # noqa: SLF001  # torch has no public name
    # What PyTorch's kernel would refuse, and arithmetic would broadcast or round.
    if rows.shape[1:2] != (norm.num_features,) or not rows.is_floating_point():
        raise ValueError(
            f"`input` must hold floating-point numbers of {norm.num_features} channels, its second "
            f"dimension, but is {rows.dtype} of shape {tuple(rows.shape)}: fit `num_features` to it"
        )
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    mean, variance, count = _statistics(wide)
    if norm.track_running_stats:
        _track(norm, mean.detach(), variance.detach() * (count / (count - 1)))
    scale = (variance + norm.eps).rsqrt()
    normal = (wide - _along(mean, wide)) * _along(scale, wide)
    if norm.weight is not None:
        normal = normal * _along(norm.weight, wide)
    if norm.bias is not None:
        normal = normal + _along(norm.bias, wide)
    return normal.to(rows.dtype)


def _track(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    momentum = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:  # a mean over all batches so far
            momentum = 1.0 / float(norm.num_batches_tracked)
    for running, new in ((norm.running_mean, mean), (norm.running_var, variance)):
        if running is not None and momentum is not None:
            running.lerp_(new.to(running), momentum)


def _statistics(rows: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return mean and biased variance of each channel over all ranks, and of how many numbers."""
    own, axes = rows.numel() // rows.shape[1], [0, *range(2, rows.dim())]
    mean = rows.sum(axes) / max(own, 1)
    spread = (rows - _along(mean, rows)).square().sum(axes)
    here = torch.stack([torch.full_like(mean, own), mean, spread]).double()
    counts, means, spreads = _OfAllRanks.apply(here).unbind(dim=1)
    count = int(counts[:, 0].sum())
    if count < 2:
        raise ValueError(
            f"batch norm must have more than one number per channel in training, but all ranks "
            f"together have {count}: use a larger batch"
        )
    mean = (counts * means).sum(dim=0) / count
    spread = spreads.sum(dim=0) + (counts * (means - mean).square()).sum(dim=0)
    return mean, spread / count, count


class _OfAllRanks(torch.autograd.Function):
    """What all ranks have, stacked; of its gradient, each rank's own part on all ranks."""

    @staticmethod
    def forward(_: Any, own: Tensor) -> Tensor:
        there = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(there, own)
        return torch.stack(there)

    @staticmethod
    @once_differentiable  # autograd does not see the collective
    def backward(_: Any, gradients: Tensor) -> Tensor:
        sums = gradients.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(sums)
        return sums[dist.get_rank()]


def _along(channels: Tensor, rows: Tensor) -> Tensor:
    """Return one number per channel, shaped to meet `rows`."""
    return channels.to(rows.dtype).view(1, -1, *[1] * (rows.dim() - 2))

"""Batch norm over the samples of all ranks, on CPUs, where PyTorch has none."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm


class SyncBatchNormCPU(_BatchNorm):
    """`torch.nn.SyncBatchNorm` for CPU tensors: one collective forward, and one backward.

    Statistics are those of the samples of all ranks together, each counted once however unevenly
    they are shared, of none included. In evaluation, and where there is one process, it is the
    batch norm that it was made from.

    Sergey Ioffe and Christian Szegedy, "Batch Normalization", ICML 2015; the statistics of the
    ranks are put together as in Chan, Golub and LeVeque, "Updating formulae and a pairwise
    algorithm for computing sample variances", 1979.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  # PyTorch's name
        if input.dim() < 2:
            raise ValueError(
                f"`input` must have 2 dimensions or more, but has {input.dim()}: add a batch's"
            )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # PyTorch's name
        """Normalise each channel, the second dimension; collective in training."""
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
        self._check_input_dim(input)
        self._check_numbers(input)
        mean, variance, count = _statistics(input.detach())
        if self.track_running_stats:
            self._track(mean, variance * (count / (count - 1)))
        wide = torch.promote_types(input.dtype, torch.float32)
        rows = _OfAllRanks.apply(input.to(wide), mean, (variance + self.eps).rsqrt(), count)
        weight, bias = (p if p is None else p.to(wide) for p in (self.weight, self.bias))
        normal = F.batch_norm(rows, mean.to(wide), variance.to(wide), weight, bias, eps=self.eps)
        return normal.to(input.dtype)

    def _check_numbers(self, rows: Tensor) -> None:
        # What PyTorch's kernel would refuse, and arithmetic would broadcast or round.
        if rows.shape[1] != self.num_features:
            raise ValueError(
                f"`input` must have {self.num_features} channels, its second dimension, but has "
                f"{rows.shape[1]}: fit `num_features` to it"
            )
        if not rows.is_floating_point():
            raise TypeError(
                f"`input` must hold floating-point numbers, but is {rows.dtype}: convert it"
            )

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # a mean over all batches so far
                momentum = 1.0 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None and momentum is not None:
                running.lerp_(new.to(running), momentum)


# Still of their old classes: users find batch norms by `isinstance`, to freeze them say. PyTorch's
# stand first, of which each has nothing but its check of dimensions.


class SyncBatchNorm1d(nn.BatchNorm1d, SyncBatchNormCPU):
    """`torch.nn.BatchNorm1d` over all ranks."""


class SyncBatchNorm2d(nn.BatchNorm2d, SyncBatchNormCPU):
    """`torch.nn.BatchNorm2d` over all ranks."""


class SyncBatchNorm3d(nn.BatchNorm3d, SyncBatchNormCPU):
    """`torch.nn.BatchNorm3d` over all ranks."""


# By the shapes that they take, which a class of the user's may have changed.
_SYNCHRONISED: dict[Any, type[SyncBatchNormCPU]] = {
    kind._check_input_dim: kind  # noqa: SLF001
    for kind in (SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d)
}


def is_synchronised(module: nn.Module) -> bool:
    """Whether it is a batch norm over all ranks, PyTorch's or ours."""
    return isinstance(module, SyncBatchNormCPU | nn.SyncBatchNorm)


def with_synchronised_batch_norms(model: nn.Module) -> nn.Module:
    """Return the model, with batch norms over all ranks.

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
    if all(parameter.device.type != "cpu" for parameter in model.parameters()):
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted
    for module in plain:  # by ours: PyTorch's refuses CPU tensors
        # The class alone: parameters, hooks, the mode and whoever holds the module stay.
        module.__class__ = _SYNCHRONISED.get(type(module)._check_input_dim, SyncBatchNormCPU)  # noqa: SLF001  # torch has no public name
    return model


def _statistics(rows: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return mean and biased variance of each channel over all ranks, and of how many numbers."""
    channels = rows.shape[1]
    here = torch.zeros(3, channels, dtype=torch.float64)
    here[0] = own = rows.numel() // channels
    if own:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        variance, here[1] = torch.var_mean(wide, _all_but_channels(rows), correction=0)
        here[2] = variance.double() * own
    there = [torch.empty_like(here) for _ in range(dist.get_world_size())]
    dist.all_gather(there, here)
    counts, means, squares = torch.stack(there).unbind(dim=1)
    count = int(counts[:, 0].sum())
    if count < 2:
        raise ValueError(
            f"batch norm must have more than one number per channel in training, but all ranks "
            f"together have {count}: use a larger batch"
        )
    mean = (counts * means).sum(dim=0) / count
    spread = squares.sum(dim=0) + (counts * (means - mean).square()).sum(dim=0)
    return mean, spread / count, count


class _OfAllRanks(torch.autograd.Function):
    """The rows as they are. Their gradient is completed by what mean and variance hang on.

    What comes back from ``(rows - mean) * inverse * weight + bias`` takes those for constants.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, mean: Tensor, inverse: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(rows, mean, inverse)
        ctx.count = count
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable  # autograd does not see the collective
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, *statistics = ctx.saved_tensors
        mean, inverse = (_along(channels, rows) for channels in statistics)
        normal = (rows - mean).mul_(inverse)
        axes = _all_but_channels(rows)
        sums = torch.stack([gradient.sum(axes), (gradient * normal).sum(axes)]).double()
        dist.all_reduce(sums)
        mean_gradient, mean_product = (_along(channels, rows) for channels in sums / ctx.count)
        return (gradient - mean_gradient).sub_(normal.mul_(mean_product)), None, None, None


def _all_but_channels(rows: Tensor) -> list[int]:
    return [axis for axis in range(rows.dim()) if axis != 1]


def _along(channels: Tensor, rows: Tensor) -> Tensor:
    """Return one number per channel, shaped to meet `rows`."""
    return channels.to(rows.dtype).view(1, -1, *[1] * (rows.dim() - 2))

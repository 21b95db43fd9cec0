"""Batch norm over the samples of all ranks: PyTorch's SyncBatchNorm."""

from torch import nn

from pardata.model._modules import BatchNorm


def synchronised(module: nn.Module) -> list[nn.Module]:
    """Return the SyncBatchNorms of a module: each forward of one in training is collective."""
    return [part for part in module.modules() if isinstance(part, nn.SyncBatchNorm)]


def check_batch_norms(model: nn.Module) -> None:
    """Refuse batch norms that would lose what a subclass adds.

    Raises:
        ValueError: names the first of them.
    """
    for name, module in model.named_modules():
        is_other = isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        if is_other and getattr(module.forward, "__func__", None) is not BatchNorm.forward:
            raise ValueError(
                f"`sync_batchnorm` must find batch norms with PyTorch's own forward, to replace "
                f"it, but `{name or 'model'}` ({type(module).__name__}) has another: put what it "
                f"adds into a module next to an nn.BatchNorm1d, 2d or 3d"
            )

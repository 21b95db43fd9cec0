"""Batch norm over the samples of all ranks: PyTorch's SyncBatchNorm."""

import torch
from torch import nn

from pardata.model._modules import BatchNorm


def synchronised(module: nn.Module) -> list[nn.Module]:
    """Return the SyncBatchNorms of a module: each forward of one in training is collective."""
    return [part for part in module.modules() if isinstance(part, nn.SyncBatchNorm)]


def check_batch_norms(model: nn.Module, device: torch.device) -> None:
    """Refuse batch norms that cannot become a SyncBatchNorm, or would lose what a subclass adds.

    Raises:
        ValueError: names the first of them.
    """
    norms = [(name, part) for name, part in model.named_modules() if isinstance(part, BatchNorm)]
    for name, module in norms:
        if device.type == "cpu":
            raise ValueError(
                f"`sync_batchnorm` must be False on a CPU, for which PyTorch has no SyncBatchNorm, "
                f"but is True for a model with batch norm, `{name or 'model'}`: leave it out; "
                f"with a microbatch_size of make_loader each microbatch has its own statistics"
            )
        if not isinstance(module, nn.SyncBatchNorm) and (
            getattr(module.forward, "__func__", None) is not BatchNorm.forward
        ):
            raise ValueError(
                f"`sync_batchnorm` must find batch norms with PyTorch's own forward, to replace "
                f"it, but `{name or 'model'}` ({type(module).__name__}) has another: put what it "
                f"adds into a module next to an nn.BatchNorm1d, 2d or 3d"
            )

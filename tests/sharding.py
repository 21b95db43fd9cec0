"""Whether this torch can shard a model on a CPU, and what is whole of one that is sharded."""

import pytest
import torch

FSDP_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
needs_fsdp = pytest.mark.skipif(
    not FSDP_ON_CPU, reason=f"fully_shard of torch {torch.__version__} needs a GPU"
)
TOGETHER = ["ddp", "fsdp"] if FSDP_ON_CPU else ["ddp"]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

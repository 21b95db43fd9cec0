"""The cure for a model that takes no batch without rows, as those of transformers."""

from typing import Any

from torch import Tensor

from pardata.collective._tree import leaves


def name_empty_share(error: Exception, module: object, inputs: Any) -> None:
    """Raise in place of a model's own error if it was run on a share that has no samples."""
    tensors = [leaf for _, leaf in leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    if not tensors or any(len(tensor) for tensor in tensors):
        return
    raise RuntimeError(
        f"the model must take a batch without rows, but {type(module).__name__} raised "
        f"{type(error).__name__}: this rank has no sample of a step that has fewer samples than "
        f"there are ranks; pass `microbatch_size` to make_loader and loop over the Microbatches, "
        f"of which this rank then has none"
    ) from error

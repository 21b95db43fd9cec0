"""A sample as fields of fixed shape: taken apart to be stored, and put together again."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pardata.collective._tree import in_brackets, leaves, mapped
from pardata.seeds._generators import numpy_or_none

_BANDS = ("L", "RGB", "RGBA", "CMYK", "YCbCr", "LA")  # image modes of 8 bits a band

Fields: TypeAlias = dict[str, Tensor]
"""The parts of every sample, by their paths: of these shapes and dtypes, and without numbers."""


def parts_of(sample: Any) -> dict[str, Tensor]:
    """Return each part of `sample` as a tensor, by its path, as ``sample[0]['box']``.

    Raises:
        TypeError: for a part that is no tensor, array, image or number, naming its path, and for
            a sample without parts.
    """
    named = {in_brackets("sample", path): leaf for path, leaf in leaves(sample)}
    if not named:
        raise TypeError(f"`sample` must have at least one part, but is {sample!r}")
    return {name: _as_tensor(leaf, name) for name, leaf in named.items()}


def fields_of(parts: Mapping[str, Tensor]) -> Fields:
    """Return what a sample of these parts is made of."""
    return {
        path: torch.empty(part.shape, dtype=part.dtype, device="meta")
        for path, part in parts.items()
    }


def store(parts: Mapping[str, Tensor], into: Mapping[str, Tensor], row: int) -> None:
    """Write the parts of a sample to row `row` of the tensor at each path.

    Raises:
        ValueError: where it is made of other parts than the first, or of other shapes or dtypes.
    """
    if parts.keys() != into.keys():
        lacks = [f"lacks `{path}`" for path in into if path not in parts]
        extra = [f"has `{path}` besides" for path in parts if path not in into]
        raise ValueError(
            f"sample {row} cannot be stored: it must have the same parts as the first sample, but "
            f"{', '.join(lacks + extra)}: return the same parts for every sample"
        )
    for path, rows in into.items():
        tensor, shape = parts[path], tuple(rows.shape[1:])
        if tuple(tensor.shape) != shape or tensor.dtype != rows.dtype:
            raise ValueError(
                f"sample {row} cannot be stored: `{path}` must be {_name_of(rows.dtype)} of shape "
                f"{shape}, as in the first sample, but is {_name_of(tensor.dtype)} of shape "
                f"{tuple(tensor.shape)}: resize, crop or convert it in the dataset's transform"
            )
        rows[row] = tensor


def filled(template: Any, parts: Iterable[Tensor]) -> Any:
    """Return a sample, or a batch, of these parts, each of the kind that it has in `template`.

    Tensors, arrays and numbers come back as such; an image stays a tensor.
    """
    following = iter(parts)
    return mapped(template, lambda _, leaf: _of_kind(leaf, next(following)))


def _of_kind(leaf: Any, tensor: Tensor) -> Any:
    if hasattr(leaf, "dtype") and not isinstance(leaf, Tensor):
        array = tensor.numpy()
        return array[()] if isinstance(leaf, numpy_or_none().generic) else array
    return tensor.item() if isinstance(leaf, int | float) else tensor


def _as_tensor(leaf: Any, path: str) -> Tensor:
    """Return a part of a sample as a tensor: an image as uint8 of shape (bands, height, width).

    Raises:
        TypeError: for what is no dense tensor, array, image or number.
    """
    what = f"a {type(leaf).__name__}"
    try:
        if type(leaf).__module__.startswith("PIL.") and hasattr(leaf, "mode"):
            what += f" of mode {leaf.mode}"
            if leaf.mode in _BANDS:
                return _of_image(leaf)
        elif isinstance(leaf, Tensor):
            what += " that is sparse, quantized or nested"
            if leaf.layout == torch.strided and not (leaf.is_quantized or leaf.is_nested):
                return leaf.detach().cpu()
        elif hasattr(leaf, "__array__") and hasattr(leaf, "dtype"):
            # A copy, in the usual order: PyTorch takes no other, and warns of read-only ones.
            plain = leaf.__array__()
            return torch.from_numpy(plain.astype(plain.dtype.newbyteorder("="), order="C"))
        elif isinstance(leaf, int | float):
            return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        what += f" ({error})"
    raise TypeError(
        f"`{path}` must be a dense tensor, an array, an image of 8 bits a band or a number, but is "
        f"{what}: convert it in the dataset, or leave it out"
    )


def _of_image(image: Any) -> Tensor:
    width, height = image.size
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(height, width, -1).permute(2, 0, 1)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""A sample as fields of fixed shape: taken apart to be stored, and put together again."""

from collections.abc import Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from pardata.cache._cache_files import Field
from pardata.seeds._generators import numpy_or_none

_BANDS = ("L", "RGB", "RGBA", "CMYK", "YCbCr", "LA")  # image modes of 8 bits a band


def leaves(sample: Any, path: str = "sample") -> Iterator[tuple[str, Any]]:
    """Yield each part of `sample` with its path, as ``sample[0]['box']``."""
    if isinstance(sample, Mapping):
        for key, value in sample.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif isinstance(sample, list | tuple):
        for index, value in enumerate(sample):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path, sample


def parts_of(sample: Any) -> dict[str, Tensor]:
    """Return each part of `sample` as a tensor, by its path.

    Raises:
        TypeError: for a part that is no tensor, array, image or number, naming its path, and for
            a sample without parts.
    """
    parts = {path: as_tensor(leaf, path) for path, leaf in leaves(sample)}
    if not parts:
        msg = f"`sample` must have at least one part, but is {sample!r}"
        raise TypeError(msg)
    return parts


def fields_of(parts: Mapping[str, Tensor]) -> list[Field]:
    """Return what a sample of these parts is made of."""
    return [Field(path, _name(tensor.dtype), tuple(tensor.shape)) for path, tensor in parts.items()]


def store(parts: Mapping[str, Tensor], into: list[Tensor], row: int, fields: list[Field]) -> None:
    """Write the parts of a sample to row `row` of each field's tensor.

    Raises:
        ValueError: where it is made of other parts than the first, or of other shapes or dtypes.
    """
    expected = {field.path for field in fields}
    if parts.keys() != expected:
        lacks = [f"lacks `{field.path}`" for field in fields if field.path not in parts]
        extra = [f"has `{path}` besides" for path in parts if path not in expected]
        msg = (
            f"it must have the same parts as the first sample, but {', '.join(lacks + extra)}: "
            f"return the same parts for every sample"
        )
        raise ValueError(msg)
    for field, rows in zip(fields, into, strict=True):
        tensor = parts[field.path]
        if tuple(tensor.shape) != field.shape or tensor.dtype != field.torch_dtype:
            msg = (
                f"`{field.path}` must be {field.dtype} of shape {field.shape}, as in the first "
                f"sample, but is {_name(tensor.dtype)} of shape {tuple(tensor.shape)}: resize, "
                f"crop or convert it in the data set's transform"
            )
            raise ValueError(msg)
        rows[row] = tensor


def rebuilt(template: Any, parts: Iterator[Any], *, collated: bool = False) -> Any:
    """Return a sample like `template`, or a batch as ``default_collate`` makes it, of `parts`."""
    if isinstance(template, Mapping):
        items = {key: rebuilt(value, parts, collated=collated) for key, value in template.items()}
        if type(template) is dict or not isinstance(template, MutableMapping):
            return items
        other = copy(template)  # a defaultdict keeps its factory
        other.update(items)
        return other
    if isinstance(template, list | tuple):
        values = [rebuilt(value, parts, collated=collated) for value in template]
        if hasattr(template, "_fields"):
            return type(template)(*values)
        return values if collated else type(template)(values)
    return next(parts)


def kinds_of(sample: Any) -> list[str]:
    """Return what each part is before it is stored, for `of_kind`."""
    return [_kind(leaf) for _, leaf in leaves(sample)]


def of_kind(kind: str, tensor: Tensor) -> Any:
    """Return `tensor` as what it was before it was stored; an image stays a tensor."""
    if kind == "number":
        return tensor.item()
    if kind == "tensor":
        return tensor
    return tensor.numpy() if kind == "array" else tensor.numpy()[()]


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return "tensor"
    if hasattr(leaf, "dtype"):
        return "numpy number" if isinstance(leaf, numpy_or_none().generic) else "array"
    return "number" if isinstance(leaf, int | float) else "tensor"


def as_tensor(leaf: Any, path: str) -> Tensor:
    """Return a part of a sample as a tensor: an image as uint8 of shape (bands, height, width).

    Raises:
        TypeError: for what is no dense tensor, array, image or number.
    """
    what = f"a {type(leaf).__name__}"
    if type(leaf).__module__.startswith("PIL.") and hasattr(leaf, "mode"):
        if leaf.mode in _BANDS:
            width, height = leaf.size
            flat = torch.frombuffer(bytearray(leaf.tobytes()), dtype=torch.uint8)
            return flat.view(height, width, -1).permute(2, 0, 1)
        what += f" of mode {leaf.mode}"
    else:
        try:
            if isinstance(leaf, Tensor):
                if leaf.layout == torch.strided and not (leaf.is_quantized or leaf.is_nested):
                    return leaf.detach().cpu()
                what += " that is sparse, quantized or nested"
            elif hasattr(leaf, "__array__") and hasattr(leaf, "dtype"):
                array = leaf.__array__()
                # A copy, in the usual order: PyTorch takes no other, and warns of read-only ones.
                return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
            elif isinstance(leaf, int | float):
                return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            what += f" ({error})"
    msg = (
        f"`{path}` must be a dense tensor, an array, an image of 8 bits a band or a number, but is "
        f"{what}: convert it in the data set, or leave it out"
    )
    raise TypeError(msg)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""A sample as fields of fixed shape: taken apart to be stored, and put together again."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pardata.cache._cache_files import Field
from pardata.collective._tree import in_brackets, leaves, mapped
from pardata.seeds._generators import numpy_or_none

_BANDS = ("L", "RGB", "RGBA", "CMYK", "YCbCr", "LA")  # image modes of 8 bits a band


def parts_of(sample: Any) -> dict[str, Tensor]:
    """Return each part of `sample` as a tensor, by its path, as ``sample[0]['box']``.

    Raises:
        TypeError: for a part that is no tensor, array, image or number, naming its path, and for
            a sample without parts.
    """
    named = {in_brackets("sample", path): leaf for path, leaf in leaves(sample)}
    if not named:
        msg = f"`sample` must have at least one part, but is {sample!r}"
        raise TypeError(msg)
    return {name: as_tensor(leaf, name) for name, leaf in named.items()}


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


def filled(template: Any, parts: Iterable[Any]) -> Any:
    """Return a sample, or a batch, like `template`, with these leaves."""
    following = iter(parts)
    return mapped(template, lambda *_: next(following))


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
    if hasattr(leaf, "dtype") and not isinstance(leaf, Tensor):
        return "numpy number" if isinstance(leaf, numpy_or_none().generic) else "array"
    return "number" if isinstance(leaf, int | float) else "tensor"


def as_tensor(leaf: Any, path: str) -> Tensor:
    """Return a part of a sample as a tensor: an image as uint8 of shape (bands, height, width).

    Raises:
        TypeError: for what is no dense tensor, array, image or number.
    """
    what = f"a {type(leaf).__name__}"
    if _is_image(leaf):
        what += f" of mode {leaf.mode}"
    elif isinstance(leaf, Tensor):
        what += " that is sparse, quantized or nested"
    convert = next((convert for is_one, convert in _CONVERSIONS if is_one(leaf)), None)
    if convert is not None:
        try:
            return convert(leaf)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            what += f" ({error})"
    msg = (
        f"`{path}` must be a dense tensor, an array, an image of 8 bits a band or a number, but is "
        f"{what}: convert it in the data set, or leave it out"
    )
    raise TypeError(msg)


def _is_image(leaf: Any) -> bool:
    return type(leaf).__module__.startswith("PIL.") and hasattr(leaf, "mode")


def _is_dense(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        return False
    return not (leaf.is_quantized or leaf.is_nested)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "__array__") and hasattr(leaf, "dtype") and not isinstance(leaf, Tensor)


def _of_image(image: Any) -> Tensor:
    width, height = image.size
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(height, width, -1).permute(2, 0, 1)


def _of_array(array: Any) -> Tensor:
    # A copy, in the usual order: PyTorch takes no other, and warns of read-only ones.
    plain = array.__array__()
    return torch.from_numpy(plain.astype(plain.dtype.newbyteorder("="), order="C"))


_CONVERSIONS: list[tuple[Callable[[Any], bool], Callable[[Any], Tensor]]] = [
    (lambda leaf: _is_image(leaf) and leaf.mode in _BANDS, _of_image),
    (_is_dense, lambda tensor: tensor.detach().cpu()),
    (_is_array, _of_array),
    (lambda leaf: isinstance(leaf, float), lambda n: torch.tensor(n, dtype=torch.float64)),
    (lambda leaf: isinstance(leaf, int), torch.tensor),
]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

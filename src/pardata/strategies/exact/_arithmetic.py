"""A probe of a device's arithmetic: whether its kernels round as others do is seen by trying them.

Processors, libraries, precisions (TF32) and environment variables choose kernels in ways that no
list of versions and flags tells. It takes some milliseconds.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from pardata._pytree import sha256_of
from pardata.environment._device import widest_float_dtype


def probe(device: torch.device) -> str:
    """Return a digest of what a device computes in each precision."""
    dtypes = list(dict.fromkeys([torch.float32, widest_float_dtype(device), torch.float16]))
    asked = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if asked is None or asked(including_emulation=False):
        dtypes.append(torch.bfloat16)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        return sha256_of(("", result) for dtype in dtypes for result in _results(dtype, device))


def _results(dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """Yield what kernels of many kinds compute, of sizes that fit their vectors and that do not."""

    def numbers(*shape: int) -> Tensor:
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64, device="cpu")
        return (whole * 7919 % 1009 / 1009 - 0.5).to(dtype).view(shape).to(device)

    rows = numbers(33, 259)
    yield numbers(64, 256) @ numbers(256, 64)
    yield (product := rows @ numbers(259, 67))
    images, filters, after = numbers(2, 5, 17, 19), numbers(9, 5, 3, 3), numbers(2, 9, 17, 19)
    yield F.conv2d(images, filters, padding=1)
    yield conv2d_input(images.shape, filters, after, padding=1)
    yield conv2d_weight(images, filters.shape, after, padding=1)
    yield product.softmax(1)
    yield F.layer_norm(rows, rows.shape[1:])
    yield from (rows.exp(), rows.sin(), rows.tanh(), numbers(10007).sum())

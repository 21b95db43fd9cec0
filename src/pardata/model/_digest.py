"""The bits of tensors, as a short text."""

import ctypes
import hashlib
from collections.abc import Iterable

from torch import Tensor


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a SHA-256 of the bits of tensors, each with a text before it."""
    digest = hashlib.sha256()
    for text, tensor in tensors:
        digest.update(text.encode())
        data = tensor.detach().cpu().contiguous()
        # The bytes as they lie in memory, without NumPy, which torch does not require.
        digest.update(
            (ctypes.c_char * data.nbytes).from_address(data.data_ptr()) if data.nbytes else b""
        )
    return digest.hexdigest()

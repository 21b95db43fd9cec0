"""The bits of samples and of weights, as a short text: what has the same text has the same bits."""

import ctypes
import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pardata.collective._tree import leaves


def digest_of(tree: Any) -> str:
    """Return a short text for the tensors, arrays, images, numbers and texts in a tree.

    Nothing is known of what else is in it but its type.
    """
    found = leaves(tree, by_text=True)
    return sha256_of((f"{path} {_form(leaf)}", leaf) for path, leaf in found)[:16]


def sha256_of(named: Iterable[tuple[str, Any]]) -> str:
    """Return a SHA-256 of the bits of leaves, each with a text before it."""
    digest = hashlib.sha256()
    for text, leaf in named:
        digest.update(text.encode())
        _add(digest, leaf)
    return digest.hexdigest()


def _form(leaf: Any) -> list[Any]:
    names: tuple[str, ...] = ("dtype", "shape") if isinstance(leaf, Tensor) else ()
    if hasattr(leaf, "tobytes"):
        names = ("dtype", "shape", "size", "mode")
    return [type(leaf).__name__, *(getattr(leaf, name, None) for name in names)]


def _add(digest: Any, leaf: Any) -> None:
    if isinstance(leaf, Tensor):
        dense = leaf.detach() if leaf.layout == torch.strided else leaf.detach().to_dense()
        plain = dense.cpu().resolve_conj().resolve_neg().contiguous()
        if plain.nbytes:  # as they lie in memory, without NumPy, which torch does not require
            digest.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
    elif str(getattr(leaf, "dtype", "")) == "object":  # an array whose bytes are addresses
        digest.update(digest_of(leaf.tolist()).encode())
    elif hasattr(leaf, "tobytes"):  # an array, a NumPy number, an image
        digest.update(leaf.tobytes())
    elif isinstance(leaf, str | bytes | int | float | complex):
        digest.update(repr(leaf).encode())

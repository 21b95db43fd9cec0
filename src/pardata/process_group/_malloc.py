"""Tell glibc's allocator to keep the memory that training frees and takes again in each step."""

import ctypes
import sys
from typing import Any

# Parameter numbers of mallopt(3), from glibc's malloc.h, with the values measured to help.
# M_MMAP_MAX: large blocks come from the heap, not from a mapping of their own. M_TRIM_THRESHOLD:
# keep the heap's top. M_TOP_PAD: grow the heap in large steps.
_SETTINGS = {-4: 0, -1: 2**31 - 1, -2: 64 * 2**20}


def tune_glibc_malloc() -> bool:
    """Stop the allocator from returning freed memory; return whether that took effect.

    By default each activation of a training step is mapped, faulted in page by page, zeroed by
    the kernel and unmapped again, step after step. Lasts for the life of the process. Elsewhere
    than under glibc nothing is done.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if not hasattr(libc, "gnu_get_libc_version"):  # musl has no mallopt
        return False
    return all(libc.mallopt(name, value) == 1 for name, value in _SETTINGS.items())

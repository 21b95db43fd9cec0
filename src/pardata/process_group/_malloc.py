"""Set glibc's malloc to keep freed memory, because each training step allocates it again."""

import ctypes
import sys
from typing import Any

# Parameters of mallopt(3), by their numbers in glibc's malloc.h, and the best values measured.
# M_MMAP_MAX: large blocks come from the heap, not from a mapping of their own. M_TRIM_THRESHOLD:
# keep the heap's top. M_TOP_PAD: grow the heap in large steps.
_SETTINGS = {-4: 0, -1: 2**31 - 1, -2: 64 * 2**20}


def tune_glibc_malloc() -> bool:
    """Stop malloc from returning freed memory to the kernel; return whether that took effect.

    By default each activation of a training step is mapped, faulted in page by page, zeroed by the
    kernel and unmapped again, step after step. It lasts until the process ends. Without glibc it
    does nothing.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if not hasattr(libc, "gnu_get_libc_version"):  # musl has no mallopt
        return False
    return all(libc.mallopt(name, value) == 1 for name, value in _SETTINGS.items())

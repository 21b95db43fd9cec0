"""Accelerators that torch says it sees, on a machine that has none."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch


@contextmanager
def accelerators(count, *, current=None, kind="cuda", **of_kind):
    """Let torch see so many, of which `current` was chosen; return which are made current.

    `of_kind` is put into the module of the kind, as ``torch.cuda``.
    """
    made_current = []
    of_all = {
        "is_available": lambda: count > 0,
        "device_count": lambda: count,
        "current_accelerator": lambda *_: torch.device(kind),
        "set_device_index": made_current.append,
    }
    of_kind |= {"is_initialized": lambda: current is not None, "current_device": lambda: current}
    modules = [(torch.accelerator, of_all), (torch.get_device_module(kind), of_kind)]
    with ExitStack() as stack:
        for module, names in modules:
            for name, what in names.items():
                if hasattr(module, name):  # mps has hardly any
                    stack.enter_context(patch.object(module, name, what))
        yield made_current

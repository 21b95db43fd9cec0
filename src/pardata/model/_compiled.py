"""What ``torch.compile`` has under private names: it tells of no module how it was compiled."""

from typing import Any

import torch
from torch import nn

# ruff: noqa: SLF001  # see above and below

# As torch.compiler.disable, which imports all of dynamo at once: pytorch/pytorch#104317.
uncompiled = torch._disable_dynamo


def fail_past_recompile_limit() -> None:
    """Fail at dynamo's limit of recompilations, in the whole process; see ``torch._dynamo.config``.

    Past the limit dynamo runs uncompiled what it has not met.
    """
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def is_compiled_in_place(part: nn.Module) -> bool:
    """Return whether ``part.compile()`` was called."""
    return part._compiled_call_impl is not None


def has_dynamic_sizes(context: Any) -> bool:
    """Return whether ``torch.compile``, which made this context, may compile for several sizes."""
    return getattr(context, "_dynamic", None) is not False

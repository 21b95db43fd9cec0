"""Whether an optimizer computes each element by itself: else it shows which rank has which."""

from collections import defaultdict
from contextlib import suppress
from copy import copy
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pardata.strategies._optimizer_steps import before_steps


def refuse_mixing_optimizers(module: nn.Module) -> None:
    """Let the first step of an optimizer of `module` raise if it gives a part other bits.

    As one that takes the norm of a parameter does, and one whose kernels round otherwise at the
    end of a tensor: that is tried. One that cannot be tried is let through.
    """
    checked, alive = WeakSet[Optimizer](), ref(module)

    def look(one: Optimizer) -> None:
        own = alive()
        if own is None or one in checked:
            return
        trained = set(map(id, own.parameters()))
        for group in one.param_groups:
            like = next((p for p in group["params"] if id(p) in trained), None)
            if like is not None and _mixes(one, group, like):
                raise RuntimeError(
                    f"the optimizer must compute each element by itself under strategy "
                    f"'exact_fsdp', because a rank has parts of parameters, but "
                    f"{type(one).__name__} gives a part other bits than the whole: pass "
                    f"fused=False, keep the parameters in float32, or use one such as AdamW"
                )
        checked.add(one)

    before_steps(module, look)


def _mixes(one: Optimizer, group: dict[str, Any], like: Tensor) -> bool:
    """Return whether it gives rows that are together other bits than the same rows in pairs."""
    with suppress(Exception):  # as one that needs a closure
        return not torch.equal(_tried(one, group, like, 60), _tried(one, group, like, 2))
    return False


def _tried(one: Optimizer, group: dict[str, Any], like: Tensor, rows: int) -> Tensor:
    """Return what steps of a copy make of a matrix, of which each parameter has so many rows."""
    start = torch.arange(300, dtype=torch.float64, device="cpu").mul(7.9).sin().view(60, 5)
    whole = start.to(like.device, like.dtype)
    parts = [nn.Parameter(part.clone()) for part in whole.split(rows)]
    trial = copy(one)
    trial.param_groups = [{**group, "params": parts, "lr": 0.1}]
    trial.state = defaultdict(dict)
    for number in range(1, 4):
        for part, gradient in zip(parts, (number * whole).cos().split(rows), strict=True):
            part.grad = gradient
        trial.step()
    return torch.cat([part.detach() for part in parts])

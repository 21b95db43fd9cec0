"""The step of `backward` that is under way, and the wrapped models that are guests in it."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from pardata.model._before import GradientsAside, KeptBuffers
from pardata.model._compiled import uncompiled
from pardata.model._sharding import forget_step, reshard, unsharded
from pardata.model._unwrap import unwrap


class Guests:
    """The other wrapped models that `loss_fn` runs in a step of `host`: a block.

    As the generator in the loss of its discriminator. Ranks may run a guest unequally often, so it
    starts no collective before the step ends. Then the guests' buffers are equalised, in the order
    in which they were first seen.

    Args:
        host: the layer of the model that the step trains.
        keeps_buffers: put the buffers of guests back in place of that.
    """

    now: ClassVar["Guests | None"] = None

    def __init__(self, host: nn.Module, *, keeps_buffers: bool = False) -> None:
        self._host, self._keeps_buffers = host, keeps_buffers
        self._found: dict[nn.Module, tuple[GradientsAside, KeptBuffers, Callable[[], None]]] = {}

    @property
    def number(self) -> int:
        """How many other wrapped models have run in the step so far."""
        return len(self._found)

    def __enter__(self) -> None:
        self._outer, Guests.now = Guests.now, self

    def __exit__(self, kind: object, *_rest: object) -> None:
        Guests.now = self._outer
        for guest in self._found:
            (reshard if kind is None else forget_step)(guest)
        trained = [p for before, *_ in self._found.values() for p in before.trained()]
        for before, *_ in self._found.values():
            before.undo()
        if kind is not None or trained or self._keeps_buffers:
            self.put_back_buffers()
        else:
            for _, _, equalise in self._found.values():
                equalise()
        if kind is None and trained:
            raise self.error_of(trained[0])

    def put_back_buffers(self) -> None:
        """Set the buffers of all guests to what they were before the step."""
        for _, buffers, _ in self._found.values():
            buffers.put_back()

    def error_of(self, parameter: Tensor) -> RuntimeError:
        """Return the error of a loss that trains a parameter which the host has not."""
        owners = [g for g in self._found if parameter in {*g.parameters(), *unsharded(g)}]
        names = [f"{type(unwrap(guest)).__name__}, another wrapped model" for guest in owners]
        what = [*names, f"a parameter of shape {tuple(parameter.shape)} outside of it"][0]
        return RuntimeError(
            f"the loss must train only the model that `backward` gets, but it also trains {what}, "
            f"whose gradient no rank would synchronise: freeze it during this call "
            f"(requires_grad_(False) before, requires_grad_(True) after), detach its output, or "
            f"put both into one module and wrap that"
        )

    def role(self, layer: nn.Module, equalise: Callable[[], None]) -> str:
        """Return the role of a wrapped model that is about to run."""
        if layer is not self._host and layer not in self._found:
            reshard(layer)  # or the gradients of a sharded one would be looked for elsewhere
            shared = set(self._host.parameters())
            own = GradientsAside(p for p in layer.parameters() if p not in shared)
            self._found[layer] = own, KeptBuffers(layer.modules()), equalise
        return "host" if layer is self._host else "guest"


def role_of(layer: nn.Module, equalise: Callable[[], None]) -> str:
    """Return whether a wrapped model is the "host" of a step, a "guest" in it, or "alone".

    A guest is taken note of, with what makes its buffers equal on all ranks.
    """
    if torch.compiler.is_compiling():
        return _role_of_compiled(layer, equalise)
    return "alone" if Guests.now is None else Guests.now.role(layer, equalise)


_role_of_compiled = uncompiled(role_of)

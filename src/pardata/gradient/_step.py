"""One step of `backward` under each strategy: what synchronises, when, and what buffers do."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from pardata.gradient._count import Piece, Pieces, Sharing, started
from pardata.gradient._tally import Tally
from pardata.model._buffers import averaged_buffers
from pardata.model._ddp import one_step, parcel_of
from pardata.model._strategy import Replica

_NOTHING = nullcontext()


class Step(Sharing):
    """Of a model that no other process trains: strategies "none" and "dp".

    Args:
        replica: the model, taken apart.
        scaler: scales what is run, if there is one.
        batch: what `backward` was given.

    Attributes:
        pieces: what is run, as soon as that is known.
        tally: what it says.
    """

    pieces: Pieces

    def __init__(self, replica: Replica, scaler: GradScaler | None, batch: Any) -> None:
        self.layer = replica.wrapper
        self.module = replica.module
        self.scaler, self.batch = scaler, batch
        self.tally = Tally()

    def whole(self) -> AbstractContextManager[None]:
        """Return the context of the whole step; after it the tally has heard from all ranks."""
        return _NOTHING

    def around(self, piece: Piece) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return the context of the forward and backward of one microbatch."""
        return _NOTHING

    def send(self) -> None:
        """Tell the others what was seen here, before the last backward runs."""

    def run(self, loss: Tensor, part: float) -> None:
        """Run the backward of a microbatch, which is `part` of the global batch."""
        # Who reduces takes the mean over the ranks: of what is meant as a sum.
        factor = part * self.size
        scaled = loss if factor == 1 else loss * factor
        (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()


class _SharedStep(Step):
    """Of ranks whose gradients are averaged by another's hand: PyTorch's.

    What all of them count is only known with the gradients, where no plan says it: these are then
    off by one factor, the same everywhere.
    """

    def __init__(self, replica: Replica, scaler: GradScaler | None, batch: Any) -> None:
        super().__init__(replica, scaler, batch)
        self.group = getattr(self.layer, "process_group", None)
        self.size = dist.get_world_size(self.group)

    def send(self) -> None:
        if self.size > 1:
            self._sums = self._sent(self.tally.told(self.size))

    def _sent(self, told: Tensor) -> Callable[[], Tensor]:
        """Send numbers, and return what returns their sums."""
        return started(told, self.group)

    def _settle(self) -> None:
        """Take the means, and correct the gradients where more or less was counted than expected.

        None of an earlier step may be in ``.grad``.
        """
        if self.size == 1:
            return
        self.tally.hear(self._sums(), self.size, self.group)
        factor = self.pieces.expected() / self.tally.total
        if isinstance(factor, Tensor):
            factor = factor.nan_to_num(posinf=0.0)  # where nothing was counted, gradients are 0
        if isinstance(factor, Tensor) or factor != 1:
            found = [p.grad for p in self.module.parameters() if p.grad is not None]
            own: list[Any] = [g.to_local() if hasattr(g, "to_local") else g for g in found]
            with torch.no_grad():
                torch._foreach_mul_(own, factor)  # as optimizers do


class ReplicatedStep(_SharedStep):
    """Strategy "ddp": every rank runs at least one microbatch, the last of which synchronises."""

    least = 1

    def __init__(self, replica: Replica, scaler: GradScaler | None, batch: Any) -> None:
        if not replica.wrapper.require_backward_grad_sync:
            raise ValueError(
                "`backward` must synchronise, but is called under no_sync(): leave out no_sync(), "
                "for backward synchronises once a call; pass microbatch_size to make_loader to "
                "accumulate"
            )
        super().__init__(replica, scaler, batch)

    @contextmanager
    def whole(self) -> Iterator[None]:
        if self.pieces.most > 1 and self.layer.static_graph:
            raise ValueError(
                f"`static_graph` must be False where a rank has more than one microbatch, here "
                f"{self.pieces.most}, for PyTorch cannot accumulate with it: leave it out of "
                f"wrap_model"
            )
        with gradients_aside(self.layer._module_parameters):  # noqa: SLF001  # a list, for a walk takes longer
            with one_step(self.layer, self.pieces.most):
                yield
            self._settle()

    def around(self, piece: Piece) -> AbstractContextManager[None]:
        last = piece is self.pieces.own[-1]
        context: AbstractContextManager[None] = _NOTHING if last else self.layer.no_sync()
        return context

    def _sent(self, told: Tensor) -> Callable[[], Tensor]:
        parcel = parcel_of(self.layer)
        if parcel is None:
            return started(told, self.group)
        parcel.numbers = told
        return lambda: parcel.sums  # after the backward


class ShardedStep(_SharedStep):
    """Strategy "fsdp": every forward and backward is collective, so all ranks run equally many."""

    equally_many = True

    def __init__(self, replica: Replica, scaler: GradScaler | None, batch: Any) -> None:
        layer = replica.wrapper
        if not hasattr(layer, "set_requires_gradient_sync"):
            raise TypeError(
                f"`model` must be sharded by fully_shard, but is in FSDP's older wrapper, "
                f"{type(layer).__name__}: pass what wrap_model(model, 'fsdp') returned"
            )
        super().__init__(replica, scaler, batch)
        for parameter in layer.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and mesh.size() != self.size:
                raise ValueError(
                    f"the model must be sharded over all {self.size} ranks, but is so over "
                    f"{mesh.size()}: give fully_shard a mesh of all ranks"
                )

    @contextmanager
    def whole(self) -> Iterator[None]:
        with (
            gradients_aside(self.module.parameters()),
            averaged_buffers(self.layer, lambda: (self.tally.count, self.tally.total)),
        ):
            yield
            self._settle()

    @contextmanager
    def around(self, piece: Piece) -> Iterator[None]:
        self.layer.set_requires_gradient_sync(piece is self.pieces.own[-1])
        try:
            yield
        finally:
            self.layer.set_requires_gradient_sync(True)


@contextmanager
def gradients_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Put away the gradients that are there, and add them to the new ones after the block."""
    # Copies: under DDP a gradient may be a part of the memory that the next one is reduced in.
    before = [(p, p.grad.clone()) for p in parameters if p.grad is not None]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient

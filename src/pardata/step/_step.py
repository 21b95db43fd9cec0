"""One step of `backward`: of a model trained alone, or whose gradients PyTorch reduces."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from pardata.data._microbatches import Microbatches
from pardata.model._before import AsFound
from pardata.model._sharding import unsharded
from pardata.step._count import Piece, Pieces, Sharing, started
from pardata.step._forward import leaves_of
from pardata.step._guests import Guests
from pardata.step._tally import Tally

_NOTHING = nullcontext()
SEEN = "_pardata_trains_alone"  # set on the layer of a model that shows its strategy


class Replica(NamedTuple):
    """This rank's copy of a model, taken apart.

    Attributes:
        model: all of it, in its layers.
        layer: by which its strategy is known; under "none" the outermost.
        module: the module inside all layers.
    """

    model: nn.Module
    layer: Any
    module: nn.Module


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
        self.layer = replica.layer
        self.module = replica.module
        self.scaler, self.batch = scaler, batch
        self.tally = Tally()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Run the whole step in the block; after it the tally has heard from all ranks.

        A step that ends in an error leaves gradients and buffers as they were.
        """
        with AsFound(self.module):
            yield

    def around(self, piece: Piece) -> AbstractContextManager[None]:  # noqa: ARG002  # the exact step uses it
        """Return the context of the forward and backward of one microbatch."""
        return _NOTHING

    def send(self) -> None:
        """Tell the others what was seen here, before the last backward runs."""

    def check(self, loss: Tensor) -> None:
        """Refuse, in a model's first step, a loss that trains something else, also in one process.

        Its gradient would be each rank's own. Every rank looks before its first backward.
        """
        if SEEN in vars(self.layer):
            return
        own = {*self.layer.parameters(), *unsharded(self.layer)}
        for leaf in leaves_of(loss):
            if isinstance(leaf, nn.Parameter) and leaf not in own:
                raise (Guests.now or Guests(self.layer)).error_of(leaf)
        vars(self.layer)[SEEN] = True

    def run(self, loss: Tensor, part: float) -> None:
        """Run the backward of a microbatch, which is `part` of the global batch."""
        # Who reduces takes the mean over the ranks: of what is meant as a sum.
        factor = part * self.size
        scaled = loss if factor == 1 else loss * factor
        (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()


class SharedStep(Step):
    """Of ranks whose gradients are averaged by another's hand: PyTorch's.

    If no plan says what all of them count, that is only known with the gradients. These are then
    off by one factor, the same everywhere.
    """

    def __init__(self, replica: Replica, scaler: GradScaler | None, batch: Any) -> None:
        super().__init__(replica, scaler, batch)
        self.group = getattr(self.layer, "process_group", None)
        self.size = dist.get_world_size(self.group)
        if isinstance(batch, Microbatches):  # else nothing says whose step it is
            where = f"step {batch.step} of epoch {batch.epoch}"
            self.tally.step = f"{where}, of a loader with seed {batch.seed}"

    def send(self) -> None:
        if self.size > 1:
            self._sums = self._sent(self.tally.told(self.size, self.layer))

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
        elif factor == 1:
            return
        found = [p.grad for p in self.module.parameters() if p.grad is not None]
        own: list[Any] = [g.to_local() if hasattr(g, "to_local") else g for g in found]
        if isinstance(factor, Tensor) and own:  # an offload_policy has put the gradients on the CPU
            factor = factor.to(own[0].device)
        for kind in {g.dtype for g in own}:
            # One dtype takes one kernel. A factor in 16 bits would be too coarse.
            fast = isinstance(factor, Tensor) and kind.itemsize > 2
            by = cast("Tensor", factor).to(kind) if fast else factor
            with torch.no_grad():
                torch._foreach_mul_([g for g in own if g.dtype == kind], by)  # as optimizers do

"""One step of `backward` under each strategy: what synchronises, when, and what buffers do."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pardata.gradient._count import Piece, Pieces, Sharing
from pardata.model._buffers import averaged_buffers
from pardata.model._ddp import one_step


class Step(Sharing):
    """Of a model that no other process trains: strategies "none" and "dp".

    Args:
        model: or the module inside it.
        group: of the ranks that train it.
        size: how many those are.
    """

    def __init__(self, model: nn.Module, group: Any = None, size: int = 1) -> None:
        first = next(model.parameters(), torch.empty(0))
        super().__init__(size, group, first.device)
        self._dtype = torch.promote_types(first.dtype, torch.float32).to_real()
        self._loss = torch.zeros((), dtype=torch.float64, device=first.device)

    def whole(self, pieces: Pieces) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return the context of the whole step."""
        return nullcontext()

    def around(self, piece: Piece, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return the context of the forward and backward of one microbatch."""
        return nullcontext()

    def run(self, loss: Tensor, part: float) -> None:
        """Run the backward of a microbatch, which is `part` of the global batch."""
        # Who reduces takes the mean over the ranks: of what is meant as a sum.
        (loss * (part * self.size)).backward()
        self._loss += loss.detach().to(self._loss) * part

    def loss(self) -> Tensor:
        """Return the mean loss of the global batch. Collective."""
        if self.size > 1:
            dist.all_reduce(self._loss, group=self.group)
        return self._loss.to(self._dtype)


class ReplicatedStep(Step):
    """Strategy "ddp": every rank runs at least one microbatch, the last of which synchronises."""

    least = 1

    def __init__(self, module: nn.Module, wrapper: DistributedDataParallel) -> None:
        if not wrapper.require_backward_grad_sync:
            raise ValueError(
                "`backward` must synchronise, but is called under no_sync(): leave out no_sync(), "
                "for backward synchronises once a call; pass microbatch_size to make_loader to "
                "accumulate"
            )
        group = wrapper.process_group
        super().__init__(module, group, dist.get_world_size(group))
        self._wrapper = wrapper

    def whole(self, pieces: Pieces) -> AbstractContextManager[None]:
        if pieces.most > 1 and self._wrapper.static_graph:
            raise ValueError(
                f"`static_graph` must be False where a rank has more than one microbatch, here "
                f"{pieces.most}, for PyTorch cannot accumulate with it: leave it out of wrap_model"
            )
        return one_step(self._wrapper)

    def around(self, piece: Piece, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        context: AbstractContextManager[None] = nullcontext() if last else self._wrapper.no_sync()
        return context


class ShardedStep(Step):
    """Strategy "fsdp": every forward and backward is collective, so all ranks run equally many."""

    equally_many = True

    def __init__(self, sharded: Any) -> None:
        if not hasattr(sharded, "set_requires_gradient_sync"):
            raise TypeError(
                f"`model` must be sharded by fully_shard, but is in FSDP's older wrapper, "
                f"{type(sharded).__name__}: pass what wrap_model(model, 'fsdp') returned"
            )
        size = dist.get_world_size()
        super().__init__(sharded, None, size)
        self._sharded = sharded
        for parameter in sharded.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and mesh.size() != size:
                raise ValueError(
                    f"the model must be sharded over all {size} ranks, but is so over "
                    f"{mesh.size()}: give fully_shard a mesh of all ranks"
                )

    def whole(self, pieces: Pieces) -> AbstractContextManager[None]:
        own = sum(piece.count for piece in pieces.own)
        return averaged_buffers(self._sharded, lambda: own / pieces.total())

    @contextmanager
    def around(self, piece: Piece, *, last: bool) -> Iterator[None]:  # noqa: ARG002
        self._sharded.set_requires_gradient_sync(last)
        try:
            yield
        finally:
            self._sharded.set_requires_gradient_sync(True)

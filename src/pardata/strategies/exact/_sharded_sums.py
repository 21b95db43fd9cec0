"""The gradients of a step of a sharded model: each part is added, in the fixed tree, by its owner.

FSDP calls a `Group` in place of its reduce-scatter, in each backward, as soon as the gradients of
the parameters that it gathers together are there.
"""

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pardata.model._sharding import forget_step, gathered_by
from pardata.model._unwrap import ShardedModule
from pardata.step._count import Piece
from pardata.strategies.exact._fixed_tree import Stack
from pardata.strategies.exact._ordered_sum import NOTHING, Exchange


class ShardedSums:
    """Adds up the gradients of a sharded model, microbatch by microbatch: as `Sums`, in its place.

    In each round each rank runs a microbatch: of `size` ranks in round n those from n * size on.

    Attributes:
        parameters: those that are trained in this step, by name.
        is_running: whether a step is.
        digest: the same on all ranks which train the same.
    """

    parameters: dict[str, nn.Parameter]
    digest: int
    count: int
    size: int
    round: int
    is_last: bool

    def __init__(self, module: nn.Module, threads: int) -> None:
        self.module, self.threads = module, threads
        self.is_running = False
        parts: list[Any] = [part for part in module.modules() if isinstance(part, ShardedModule)]
        self._groups = [Group(self, part) for part in parts]
        for part, group in zip(parts, self._groups, strict=True):
            part.set_custom_reduce_scatter(group)
            # Else each leaf would be multiplied by what depends on the number of ranks.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def train(self, parameters: dict[str, nn.Parameter]) -> None:
        """Say which parameters the next step trains."""
        self.parameters = parameters
        facts = [(name, p.dtype, p.shape) for name, p in parameters.items()]
        self.digest = zlib.crc32(repr(facts).encode())

    def begin_step(self, exchange: Exchange, *_: object) -> None:
        """Begin a step."""
        self.count, self.size = exchange.count, exchange.size
        self.round, self.is_running = -1, True
        # So that all ranks send as much, whatever a microbatch uses.
        self._reduce_unused(True)
        for group in self._groups:
            group.begin_step()

    def end_step(self) -> None:
        """End it, also where it has failed."""
        self.is_running = False
        self._reduce_unused(False)
        for group in self._groups:
            group.end_step()

    def _reduce_unused(self, on: bool) -> None:  # noqa: FBT001  # as FSDP has it
        module: Any = self.module
        module.set_reduce_scatter_unused_params(on)

    def begin(self, piece: Piece, *, last: bool) -> None:
        """Begin the next round, in which this rank runs `piece`."""
        self.round, self.is_last = self.round + 1, last
        for group in self._groups:
            group.begin(counts=piece.count > 0)

    def watch(self) -> None:
        """Take note of what the backward that comes next uses: the forward has gathered it."""
        for group in self._groups:
            group.watch()

    def end(self) -> None:
        """End a round: all was added as it came."""

    def send_rest(self, *_: object) -> None:
        """Send what is left: all was sent as it came."""

    def finish(self) -> None:
        """Wait for what was sent: that was done."""

    def used(self) -> list[bool]:
        """Return which parameters have had a gradient here, group by group."""
        return [own in group.used for group in self._groups for own in group.trained]

    def set_gradients(self, used: list[bool]) -> None:
        """Leave no gradient in those that are not `used` on any rank; the others have theirs."""
        every = [own for group in self._groups for own in group.trained]
        for own, is_used in zip(every, used, strict=True):
            if not is_used:
                own.sharded_param.grad = None


class Group:
    """The parameters that FSDP gathers together, and the sum of the parts that this rank owns.

    Attributes:
        trained: of FSDP's, those of the parameters that the step trains.
        used: which of them have had a gradient in this step.
    """

    def __init__(self, sums: ShardedSums, part: nn.Module) -> None:
        self._sums, self._part = sums, part
        self._watched = set[Any]()

    def begin_step(self) -> None:
        """Forget the step before."""
        found = gathered_by(self._part)
        self.trained = [own for own in found if own.sharded_param.requires_grad]
        self.used = set[Any]()
        self._stack = Stack[Tensor](self._sums.count, Tensor.add_)
        self._next = 0  # the number of the leaf that is added next

    def end_step(self) -> None:
        """Keep no memory."""
        self._stack.pieces.clear()

    def begin(self, *, counts: bool) -> None:
        """Begin a round."""
        self._counts, self._now = counts, set[Any]()

    def watch(self) -> None:
        """Hook what autograd is to give gradients, as soon as there is that."""
        for own in self.trained:
            if own not in self._watched and hasattr(own, "_unsharded_param"):
                hook = self._noting(own)
                own._unsharded_param.register_post_accumulate_grad_hook(hook)  # noqa: SLF001  # torch has no public name
                self._watched.add(own)

    def _noting(self, own: Any) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                names = self._sums.parameters.items()
                name = next(name for name, p in names if p is own.sharded_param)
                raise TypeError(
                    f"gradients must be dense under strategy 'exact_fsdp', but that of `{name}` "
                    f"is sparse: make the embedding with sparse=False"
                )
            self._now.add(own)

        return note

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what comes and what is returned: FSDP's own choice."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *_: Any, **__: Any
    ) -> None:
        """Be the reduce-scatter of FSDP: it adds to ``.grad`` nothing, and at last the sum."""
        sums = self._sums
        if not sums.is_running:
            forget_step(sums.module)
            raise RuntimeError(
                "under strategy 'exact_fsdp' only `pardata.backward` must run a backward, but the "
                "parameters got gradients from another: call backward(model, loss_fn, batch) in "
                "place of loss.backward()"
            )
        first = sums.round * sums.size
        if self._next > first:
            raise RuntimeError("several")
        rows = self._blanked(input_tensor.view(sums.size, -1))
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=group)
        for number in range(self._next, first):  # before the first forward that gathered these
            self._push(number, None)
        for number, leaf in zip(range(first, sums.count), received, strict=False):
            self._push(number, leaf)
        self._next = first + sums.size
        # In memory of its own: that of `received` is as much as all parameters of the group.
        self._stack.pieces = [
            (span, leaf.clone() if leaf is not None and span[0] >= first else leaf)
            for span, leaf in self._stack.pieces
        ]
        if sums.is_last:
            ((_, total),) = self._stack.pieces
            output_tensor.copy_(total)
            self._stack.pieces.clear()
        else:
            output_tensor.fill_(NOTHING)

    def _push(self, number: int, leaf: Tensor | None) -> None:
        self._stack.push((number, number + 1), leaf)

    def _blanked(self, rows: Tensor) -> Tensor:
        """Return what is sent, one row for each rank, without what this microbatch has not used."""
        self.used |= self._now if self._counts else set()
        sizes = [_padded(own.sharded_param.shape, len(rows)) for own in self.trained]
        if sum(sizes) != rows.shape[1]:
            raise RuntimeError("changed")
        for own, part in zip(self.trained, rows.split(sizes, dim=1), strict=True):
            if own not in self._now or not self._counts:
                part.fill_(NOTHING)
        return rows


def _padded(shape: torch.Size, size: int) -> int:
    """Return how many numbers each of `size` ranks has of a parameter, with those that fill up."""
    return -(-shape[0] // size) * shape[1:].numel()

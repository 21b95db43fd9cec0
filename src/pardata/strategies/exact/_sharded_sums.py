"""The gradients of a step of a sharded model: each part is added, in the fixed tree, by its owner.

FSDP calls a `Group` in place of its reduce-scatter. It does so in each backward, as soon as the
gradients of the parameters are there that it gathers together.
"""

import zlib
from functools import partial
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
    """Adds up the gradients of a sharded model, microbatch by microbatch: in the place of `Sums`.

    In round n the `size` ranks run the microbatches from n * size on, one each.

    Args:
        module: which is sharded, in blocks or whole.
        threads: as `ExactModel` was given them.

    Attributes:
        parameters: those that this step trains, by name.
        digest: the same on all ranks which train the same.
        groups: what is added up together, in the order of the modules.
        is_running: whether a step is.
        round: its number.
        is_last: whether it is the last one.
    """

    parameters: dict[str, nn.Parameter]

    def __init__(self, module: nn.Module, threads: int) -> None:
        self.module: Any = module
        self.threads, self.is_running = threads, False
        parts: list[Any] = [part for part in module.modules() if isinstance(part, ShardedModule)]
        self.groups = [Group(self, part) for part in parts]
        for part, group in zip(parts, self.groups, strict=True):
            part.set_custom_reduce_scatter(group)
            # Else FSDP would multiply gradients, by what depends on the number of ranks.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def train(self, parameters: dict[str, nn.Parameter]) -> None:
        """Say what the next step trains."""
        self.parameters = parameters
        facts = [(name, p.dtype, p.shape) for name, p in parameters.items()]
        self.digest = zlib.crc32(repr(facts).encode())

    def begin_step(self, exchange: Exchange, _may_send: object) -> None:
        """Begin a step."""
        self.count, self.size, self.round, self.is_running = exchange.count, exchange.size, -1, True
        # So that all ranks send equally much, whatever a microbatch uses.
        self.module.set_reduce_scatter_unused_params(True)
        for group in self.groups:
            group.begin_step()

    def end_step(self) -> None:
        """End it, also where it has failed: nothing is kept."""
        self.is_running = False
        self.module.set_reduce_scatter_unused_params(False)
        for group in self.groups:
            group.stack.pieces.clear()

    def begin(self, piece: Piece, *, last: bool) -> None:
        """Begin the next round, with what this rank runs in it."""
        self.round, self.is_last = self.round + 1, last
        for group in self.groups:
            group.begin(counts=piece.count > 0)

    def watch(self) -> None:
        """Note what the next backward uses: the forward has gathered that."""
        for group in self.groups:
            group.watch()

    def end(self) -> None:
        """End a round, in which everything was added as it came."""
        for group in self.groups:
            group.end()

    def send_rest(self, *_: object) -> None:
        """Send what is left, as `Sums` does: nothing is."""

    def finish(self) -> None:
        """Wait for what was sent: nothing is on its way."""

    def used(self) -> list[bool]:
        """Return which parameters have had a gradient here, group by group."""
        return [own in group.used for group in self.groups for own in group.trained]

    def set_gradients(self, used: list[bool]) -> None:
        """Leave the gradients of those that are `used` on any rank, which they have, and no other.

        The others have one that FSDP has made of nothing.
        """
        trained = [own for group in self.groups for own in group.trained]
        for own, is_used in zip(trained, used, strict=True):
            if not is_used:
                own.sharded_param.grad = None


class Group:
    """The parameters that FSDP gathers together, and the sum of the parts that this rank owns.

    Attributes:
        trained: what FSDP keeps of those that the step trains.
        used: which of them have had a gradient here in this step.
        stack: what was added up.
    """

    def __init__(self, sums: ShardedSums, part: nn.Module) -> None:
        self._sums, self._part = sums, part
        self._watched = set[Any]()

    def begin_step(self) -> None:
        """Forget the step before."""
        self.trained = [p for p in gathered_by(self._part) if p.sharded_param.requires_grad]
        self.used = set[Any]()
        self.stack = Stack[Tensor](self._sums.count, Tensor.add_)
        self._next = 0  # the number of the microbatch whose gradient is pushed next

    def begin(self, *, counts: bool) -> None:
        """Begin a round."""
        self._counts, self._now = counts, set[Any]()

    def end(self) -> None:
        """End a round: FSDP must have called, if there are gradients."""
        if self._now and self._next <= self._sums.round * self._sums.size:
            raise RuntimeError(
                f"the loss must depend on what the model returns under strategy 'exact_fsdp', but "
                f"`{self._name(next(iter(self._now)))}` got a gradient from a loss that does not: "
                f"compute what is made of parameters alone in the model's forward"
            )

    def watch(self) -> None:
        """Hook what autograd gives gradients, as soon as FSDP has made that."""
        for own in self.trained:
            if own not in self._watched and hasattr(own, "_unsharded_param"):
                whole = own._unsharded_param  # noqa: SLF001  # torch has no public name
                whole.register_post_accumulate_grad_hook(partial(self._note, own))
                self._watched.add(own)

    def _note(self, own: Any, whole: Any) -> None:
        self._now.add(own)
        if whole.grad.layout != torch.strided:
            raise TypeError(
                f"gradients must be dense under strategy 'exact_fsdp', but that of "
                f"`{self._name(own)}` is sparse: make the embedding with sparse=False"
            )

    def _name(self, own: Any) -> str:
        named = self._sums.parameters.items()
        return next((name for name, p in named if p is own.sharded_param), "a former parameter")

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is sent, and for what is returned."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *_: Any, **__: Any
    ) -> None:
        """Return to FSDP, which adds it to ``.grad``, nothing, and at last the sum. Collective."""
        sums = self._sums
        self._check()
        real = torch.view_as_real if input_tensor.is_complex() else torch.positive
        own = self._sent(real(input_tensor.view(sums.size, -1)))
        received = torch.empty_like(own)
        dist.all_to_all_single(received, own, group=group)
        first = sums.round * sums.size
        for number in range(self._next, first):  # rounds in which FSDP has gathered none of them
            self._push(number, None)
        for number, part in zip(range(first, sums.count), received, strict=False):
            self._push(number, part)
        self._next = first + sums.size
        if sums.is_last:
            ((_, total),) = self.stack.pieces
            assert total is not None  # noqa: S101  # a part of it has just been pushed
            real(output_tensor).copy_(total)
            self.stack.pieces.clear()
            return
        # What is left in memory of its own: that of `received` is as much as the whole gradients.
        self.stack.pieces = [
            (span, part.clone() if part is not None and span[0] >= first else part)
            for span, part in self.stack.pieces
        ]
        real(output_tensor).fill_(NOTHING)

    def _push(self, number: int, part: Tensor | None) -> None:
        self.stack.push((number, number + 1), part)

    def _check(self) -> None:
        sums = self._sums
        if not sums.is_running:
            forget_step(sums.module)
            raise RuntimeError(
                "under strategy 'exact_fsdp' only `pardata.backward` must run a backward, but "
                "parameters got gradients from another: call backward(model, loss_fn, batch) in "
                "place of loss.backward()"
            )
        if self._next > sums.round * sums.size:
            raise RuntimeError(
                f"a part of the model must run backward once in a microbatch under strategy "
                f"'exact_fsdp', but that with `{self._name(self.trained[0])}` did so again: leave "
                f"what runs several times out of `blocks`, and pass use_reentrant=False to "
                f"checkpoint"
            )

    def _sent(self, rows: Tensor) -> Tensor:
        """Return what each rank is to get of this microbatch: nothing of what it has not used."""
        if self._counts:
            self.used |= self._now
        # As FSDP lays them out: as much for each rank of each parameter.
        shapes = [own.sharded_param.shape for own in self.trained]
        sizes = [-(-shape[0] // len(rows)) * shape[1:].numel() for shape in shapes]
        if sum(sizes) != rows.shape[1]:
            raise RuntimeError(
                "what is trained must not change within a step under strategy 'exact_fsdp', but "
                "parameters were frozen, or no longer so, since it began: call requires_grad_() "
                "before backward"
            )
        for own, part in zip(self.trained, rows.split(sizes, dim=1), strict=True):
            if not (self._counts and own in self._now):
                part.fill_(NOTHING)
        return rows

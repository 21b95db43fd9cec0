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

from pardata.model._before import name_of
from pardata.model._sharding import forget_step, gathered_by
from pardata.model._unwrap import ShardedModule
from pardata.step._count import Microbatch
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
        groups: what FSDP gathers together.
        is_running: whether a step is.
        first: the number of the first microbatch of the round.
        is_last: whether it is the last round.
        counts: whether what this rank runs in it counts.
        now: what FSDP keeps of the parameters that have had a gradient in it.
    """

    parameters: dict[str, nn.Parameter]

    def __init__(self, module: nn.Module, threads: int) -> None:
        self.module: Any = module
        self.threads, self.is_running = threads, False
        self._watched = set[Any]()
        parts: list[Any] = [part for part in module.modules() if isinstance(part, ShardedModule)]
        self.groups = [Group(self, part) for part in parts]
        for part, group in zip(parts, self.groups, strict=True):
            part.set_custom_reduce_scatter(group)
            # Else FSDP would multiply gradients, by what depends on the number of ranks.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def __enter__(self) -> None:
        self.is_running = True
        # So that all ranks send equally much, whatever a microbatch uses.
        self.module.set_reduce_scatter_unused_params(True)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            forget_step(self.module)  # also what was in .grad before: that is put back next
        self.is_running = False
        self.module.set_reduce_scatter_unused_params(False)
        for group in self.groups:
            group.stack.subtrees.clear()

    def train(self, parameters: dict[str, nn.Parameter]) -> None:
        """Say what the next step trains."""
        self.parameters = parameters
        facts = [(name, p.dtype, p.shape) for name, p in parameters.items()]
        self.digest = zlib.crc32(repr(facts).encode())

    def begin_step(self, exchange: Exchange, _may_send: object) -> None:
        """Begin a step."""
        self.count, self.size, self.first = exchange.count, exchange.size, -exchange.size
        for group in self.groups:
            group.begin_step()

    def begin(self, microbatch: Microbatch, *, last: bool) -> None:
        """Begin the next round, with what this rank runs in it."""
        self.first, self.is_last = self.first + self.size, last
        self.counts, self.now = microbatch.count > 0, set[Any]()

    def watch(self) -> None:
        """Hook what the next backward gives gradients: the forward has gathered that."""
        for own in self._trained():
            if own not in self._watched and hasattr(own, "_unsharded_param"):
                gathered = own._unsharded_param  # noqa: SLF001  # torch has no public name
                gathered.register_post_accumulate_grad_hook(partial(self._note, own))
                self._watched.add(own)

    def _note(self, own: Any, gathered: Any) -> None:
        self.now.add(own)
        if gathered.grad.layout != torch.strided:
            raise TypeError(
                f"gradients must be dense under strategy 'exact_fsdp', but that of "
                f"`{self.name_of(own)}` is sparse: make the embedding with sparse=False"
            )

    def name_of(self, own: Any) -> str:
        """Return the name of a parameter, of what FSDP keeps of it."""
        return name_of(own.sharded_param, self.parameters.items())

    def end(self) -> None:
        """End a round: FSDP must have called each group with gradients, which adds them."""
        for group in self.groups:
            if group.next <= self.first and (unsent := self.now.intersection(group.trained)):
                raise RuntimeError(
                    f"the loss must depend on what the model returns under strategy 'exact_fsdp', "
                    f"but `{self.name_of(unsent.pop())}` got a gradient from a loss that does not: "
                    f"compute what is made of parameters alone in the model's forward"
                )

    def send_rest(self) -> None:
        """Send what is left, as `Sums` does: nothing is."""

    def finish(self) -> None:
        """Wait for what was sent: nothing is on its way."""

    def _trained(self) -> list[Any]:
        return [own for group in self.groups for own in group.trained]

    def used(self) -> list[bool]:
        """Return which parameters have had a gradient here, group by group."""
        return [own in group.used for group in self.groups for own in group.trained]

    def set_gradients(self, used: list[bool]) -> None:
        """Leave the gradients of those that are `used` on any rank, which they have, and no other.

        The others have one that FSDP has made of nothing.
        """
        for own, is_used in zip(self._trained(), used, strict=True):
            if not is_used:
                own.sharded_param.grad = None


class Group:
    """The parameters that FSDP gathers together, and the sum of the parts that this rank owns.

    Attributes:
        trained: what FSDP keeps of those that the step trains.
        used: which of them have had a gradient here in this step.
        stack: what was added up.
        next: the number of the microbatch whose gradient is pushed next.
    """

    def __init__(self, sums: ShardedSums, part: nn.Module) -> None:
        self._sums, self._part = sums, part

    def begin_step(self) -> None:
        """Forget the step before."""
        self.trained = [p for p in gathered_by(self._part) if p.sharded_param.requires_grad]
        self.used = set[Any]()
        self.stack = Stack[Tensor](self._sums.count, Tensor.add_)
        self.next = 0

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
        sent = self._sent(real(input_tensor.view(sums.size, -1)))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        # Nothing, of rounds in which FSDP has gathered none of them.
        parts = [*[None] * (sums.first - self.next), *received][: sums.count - self.next]
        for number, part in enumerate(parts, start=self.next):
            self.stack.push((number, number + 1), part)
        self.next = sums.first + sums.size
        if sums.is_last:
            real(output_tensor).copy_(self.stack.total())
            self.stack.subtrees.clear()
            return
        # What is left in memory of its own: that of `received` is as much as the whole gradients.
        self.stack.subtrees = [
            (span, part.clone() if part is not None and span[0] >= sums.first else part)
            for span, part in self.stack.subtrees
        ]
        real(output_tensor).fill_(NOTHING)

    def _check(self) -> None:
        sums = self._sums
        if not sums.is_running:
            forget_step(sums.module)
            raise RuntimeError(
                "under strategy 'exact_fsdp' only `pardata.backward` must run a backward, but "
                "parameters got gradients from another: call backward(model, loss_fn, batch) in "
                "place of loss.backward()"
            )
        if self.next > sums.first:
            raise RuntimeError(
                f"a part of the model must run backward once in a microbatch under strategy "
                f"'exact_fsdp', but that with `{sums.name_of(self.trained[0])}` did so again: "
                f"leave what runs several times out of `blocks`, and pass use_reentrant=False to "
                f"checkpoint"
            )

    def _sent(self, rows: Tensor) -> Tensor:
        """Return what each rank is to get of this microbatch: nothing of what it has not used."""
        sums = self._sums
        used = sums.now.intersection(self.trained) if sums.counts else set[Any]()
        self.used |= used
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
            if own not in used:
                part.fill_(NOTHING)
        return rows

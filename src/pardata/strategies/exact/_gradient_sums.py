"""The gradients of a step, added in the fixed tree, and sent in buckets while a backward runs."""

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from pardata.model._torch_internals import name_of, parameters_of
from pardata.strategies._loss_weights import Microbatch
from pardata.strategies._step import active_model
from pardata.strategies.exact._bucket import buckets_of
from pardata.strategies.exact._tree_all_reduce import TreeLayout

_AHEAD = 2  # buckets that are sent before the first of them is added: what is received takes room


class GradientSums:
    """Adds up the gradients of this rank's microbatches, and those of all ranks.

    A hook on each parameter tells that its gradient is there. In a step of this model the gradient
    is added; outside of one it is an error. Hooks and sums are neither copied nor pickled.

    Args:
        module: whose parameters are hooked.
        threads: as `ExactModel` was given them.

    Attributes:
        parameters: those that this step trains, by name.
        digest: the same on all ranks which train the same.
    """

    def __init__(self, module: nn.Module, threads: int) -> None:
        self.module, self.threads = module, threads
        self.parameters: dict[str, nn.Parameter] = {}
        self.hooked = set[nn.Parameter]()
        self._layouts: list[tuple[object, ...]] | None = None
        self._hook_parameters()

    def __reduce__(self) -> tuple[Any, ...]:
        return GradientSums, (self.module, self.threads)

    def _hook_parameters(self) -> None:
        """Hook every parameter that is not yet, frozen ones too: they may be trained later."""
        for parameter in parameters_of(self.module):
            can_be_trained = parameter.is_floating_point() or parameter.is_complex()
            if can_be_trained and parameter not in self.hooked and not parameter.is_inference():
                trained = parameter.requires_grad
                hook = partial(_received, ref(self))  # the parameter may outlive its wrapper
                parameter.requires_grad_().register_post_accumulate_grad_hook(hook)
                parameter.requires_grad_(trained)
                self.hooked.add(parameter)

    def train(self, parameters: dict[str, nn.Parameter]) -> None:
        """Say what the next step trains. Buckets live as long as that, and its layout, stay."""
        self._hook_parameters()
        layouts: list[tuple[object, ...]] = [
            (p.dtype, p.shape, p.stride()) for p in parameters.values()
        ]
        are_same = [*map(id, parameters.values())] == [*map(id, self.parameters.values())]
        if are_same and layouts == self._layouts:
            return
        self.parameters, self._layouts = parameters, layouts
        self.digest = zlib.crc32(repr([*parameters, *layouts]).encode())
        self._buckets = buckets_of(parameters.values())
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}

    def begin_step(self, exchange: TreeLayout, may_send: Callable[[], bool]) -> None:
        """Begin a step.

        Args:
            exchange: of it.
            may_send: returns whether all ranks send the same: nothing is sent where they do not.
        """
        self._may_send, self._sent, self._added = may_send, 0, 0
        for bucket in self._buckets:
            bucket.begin_step(exchange)
        # On a CPU the last one takes along what is known only after the backward.
        self._early = len(self._buckets) - next(self.module.parameters()).is_cpu

    def begin(self, microbatch: Microbatch, *, last: bool) -> None:
        """Begin a microbatch, whose gradients come to `receive`; what counts 0 leaves none."""
        self._number, self._counts, self._is_last = microbatch.number, microbatch.count > 0, last
        for bucket in self._buckets:
            bucket.begin()

    def receive(self, parameter: nn.Parameter) -> None:
        """Take note that a parameter has got a gradient, be it one of several."""
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            raise RuntimeError(
                f"what is trained must not change within a step under strategy 'exact', but a "
                f"parameter of shape {tuple(parameter.shape)} got a gradient that was frozen, or "
                f"not there, when it began: call requires_grad_() before backward"
            )
        name = partial(name_of, parameter, self.parameters.items())
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise TypeError(
                f"gradients must be dense under strategy 'exact', but that of `{name()}` is "
                f"sparse: make the embedding with sparse=False"
            )
        if parameter not in bucket.missing:
            raise RuntimeError(
                f"a backward must give each parameter one gradient under strategy 'exact', but "
                f"`{name()}` got two: pass use_reentrant=False to torch.utils.checkpoint"
            )
        bucket.missing.discard(parameter)
        if not bucket.missing and self._counts:
            bucket.take(self._number, counts=True)
            if self._is_last:
                self._send()

    def end(self) -> None:
        """End a microbatch: add what is left of it."""
        for bucket in self._buckets:
            if not bucket.is_added and self._number >= 0:
                bucket.take(self._number, counts=self._counts)
        for parameter in self.parameters.values():
            parameter.grad = None  # what it came from does not count
        if self._is_last:
            self._send()

    def _send(self) -> None:
        """Send what is complete. Collective, as is what follows."""
        # In the same order on every rank, whichever is complete first.
        while self._sent < self._early and self._buckets[self._sent].is_added and self._may_send():
            self._send_next()

    def _send_next(self, payload: Tensor | None = None) -> None:
        self._buckets[self._sent].send(payload)
        self._sent += 1
        self._add_up(self._sent - _AHEAD)

    def _add_up(self, count: int) -> None:
        """Add so many buckets, on their owners."""
        for bucket in self._buckets[self._added : max(count, 0)]:
            bucket.sum.add()
            self._added += 1

    def send_rest(self, payload: Tensor | None = None) -> None:
        """Send what is left, `payload` with the last of it.

        A rank that ran a placeholder alone has sent nothing before: no other collective may begin
        until all ranks have sent the same.
        """
        while self._sent < len(self._buckets):
            is_last = self._sent == len(self._buckets) - 1
            self._send_next(payload if is_last else None)

    def finish(self) -> Tensor:
        """Add what was sent, and return the sums of the payload."""
        self._add_up(len(self._buckets))
        return [bucket.finish() for bucket in self._buckets][-1]

    def used(self) -> list[bool]:
        """Return which parameters have had a gradient here, bucket by bucket."""
        return [used for bucket in self._buckets for used in bucket.used]

    def set_gradients(self, used: list[bool]) -> None:
        """Set the gradients of the parameters that are `used` on any rank."""
        each = iter(used)
        for bucket in self._buckets:
            bucket.set_gradients([next(each) for _ in bucket.parameters])


def _received(hooked_by: "ref[GradientSums]", parameter: nn.Parameter) -> None:
    """Hand a gradient on to the step that is run, and refuse it where none is."""
    sums, layer = hooked_by(), active_model()
    if sums is None:
        return
    running: GradientSums | None = vars(layer).get("exact") if layer is not None else None
    if sums is running:
        sums.receive(parameter)
    # A model may be wrapped again: then another wrapper of the same parameter runs the step.
    elif running is None or parameter not in running.hooked:
        parameter.grad = None  # it is this rank's alone, and a later `backward` would add to it
        name = name_of(parameter, sums.module.named_parameters())
        raise RuntimeError(
            f"under strategy 'exact' only `pardata.backward` must run a backward, but `{name}` got "
            f"a gradient from another: call backward(model, loss_fn, batch) in place of "
            f"loss.backward()"
        )

"""Sums the gradients of a step in the fixed tree, and sends buckets during the last backward.

Does not support sparse gradients, nor two gradients of a parameter in one backward.
"""

import zlib
from collections.abc import Callable
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn

from pardata.model._torch_internals import name_of, parameters_of
from pardata.strategies._forward import active_model
from pardata.strategies._loss_weights import Microbatch
from pardata.strategies.exact._bucket import buckets_of
from pardata.strategies.exact._tree_all_reduce import TreeLayout

_AHEAD = 2  # buckets in flight before the first is summed, which bounds the memory of received rows


class GradientSums:
    """The sums of gradients over this rank's microbatches, and over all ranks.

    A hook on each parameter is called with its gradient. In a step of this model it adds the
    gradient; outside of one it raises. Hooks and sums are neither copied nor pickled.

    Args:
        module: the module whose parameters get hooks.
        threads: as in `ExactModel`.

    Attributes:
        parameters: the trained parameters of this step, by name.
        digest: a hash of their names and layouts.
    """

    def __init__(self, module: nn.Module, threads: int) -> None:
        self.module, self.threads = module, threads
        self.parameters: dict[str, nn.Parameter] = {}
        self.hooked = set[nn.Parameter]()
        self._layouts: list[tuple[object, ...]] | None = None
        self._hook_parameters()

    def __reduce__(self) -> tuple[object, ...]:
        return GradientSums, (self.module, self.threads)

    def _hook_parameters(self) -> None:
        """Register a hook on each new parameter, also on frozen ones: they may be trained later."""
        for parameter in parameters_of(self.module):
            can_be_trained = parameter.is_floating_point() or parameter.is_complex()
            if can_be_trained and parameter not in self.hooked and not parameter.is_inference():
                trained = parameter.requires_grad
                # Weak, because the parameter may outlive its wrapper.
                hook = partial(_received, ref(self))
                parameter.requires_grad_().register_post_accumulate_grad_hook(hook)
                parameter.requires_grad_(trained)
                self.hooked.add(parameter)

    def train(self, parameters: dict[str, nn.Parameter]) -> None:
        """Set the parameters of the next step; buckets are reused if these and layouts stay."""
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

    def begin_step(self, layout: TreeLayout, may_send: Callable[[], bool]) -> None:
        """Begin a step.

        Args:
            layout: the layout of the step.
            may_send: returns whether ranks agree; otherwise nothing is sent during the backward.
        """
        self._may_send, self._sent, self._added = may_send, 0, 0
        for bucket in self._buckets:
            bucket.begin_step(layout)
        # On a CPU the last bucket also carries the payload, which is known only after the backward.
        self._early = len(self._buckets) - next(self.module.parameters()).is_cpu

    def begin(self, microbatch: Microbatch, *, last: bool) -> None:
        """Begin a microbatch, whose gradients `receive` gets; one that counts 0 adds nothing."""
        self._number, self._counts, self._is_last = microbatch.number, microbatch.count > 0, last
        for bucket in self._buckets:
            bucket.begin()

    def receive(self, parameter: nn.Parameter) -> None:
        """Handle a parameter's gradient: when a bucket is complete, add it, and perhaps send it."""
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            msg = "what is trained must not change in a step of 'exact', but a parameter of shape "
            msg += f"{tuple(parameter.shape)} did: call requires_grad_() before backward"
            raise RuntimeError(msg)
        name = partial(name_of, parameter, self.parameters.items())
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise TypeError(
                f"gradients must be dense under 'exact', but `{name()}`'s is not: pass sparse=False"
            )
        if parameter not in bucket.missing:
            raise RuntimeError(
                f"`{name()}` must get one gradient, not two: pass use_reentrant=False to checkpoint"
            )
        bucket.missing.discard(parameter)
        if not bucket.missing and self._counts:
            bucket.take(self._number, counts=True)
            if self._is_last:
                self._send()

    def end(self) -> None:
        """End a microbatch: add incomplete buckets."""
        for bucket in self._buckets:
            if not bucket.is_added and self._number >= 0:
                bucket.take(self._number, counts=self._counts)
        for parameter in self.parameters.values():
            parameter.grad = None  # a placeholder's
        if self._is_last:
            self._send()

    def _send(self) -> None:
        """Send complete buckets. Collective, as are the next methods."""
        # In a fixed order, whichever bucket is complete first.
        while self._sent < self._early and self._buckets[self._sent].is_added and self._may_send():
            self._send_next()

    def _send_next(self, payload: Tensor | None = None) -> None:
        self._buckets[self._sent].send(payload)
        self._sent += 1
        self._add_up(self._sent - _AHEAD)

    def _add_up(self, count: int) -> None:
        """Sum the first `count` buckets on the owners of their elements."""
        for bucket in self._buckets[self._added : max(count, 0)]:
            bucket.sum.add()
            self._added += 1

    def send_rest(self, payload: Tensor | None = None) -> None:
        """Send the remaining buckets, the last one with `payload`.

        A rank with only a placeholder has sent nothing before. So no other collective may start
        before this.
        """
        while self._sent < len(self._buckets):
            is_last = self._sent == len(self._buckets) - 1
            self._send_next(payload if is_last else None)

    def finish(self) -> Tensor:
        """Finish the sums, and return those of the payload."""
        self._add_up(len(self._buckets))
        return [bucket.finish() for bucket in self._buckets][-1]

    def used(self) -> list[bool]:
        """Return for each parameter, in bucket order, whether it had a gradient on this rank."""
        return [used for bucket in self._buckets for used in bucket.used]

    def set_gradients(self, used: list[bool]) -> None:
        """Set ``.grad`` of the parameters that are `used` on any rank."""
        each = iter(used)
        for bucket in self._buckets:
            bucket.set_gradients([next(each) for _ in bucket.parameters])


def _received(hooked_by: "ref[GradientSums]", parameter: nn.Parameter) -> None:
    """Pass a gradient to the running step; raise if no step of the model runs."""
    sums, layer = hooked_by(), active_model()
    if sums is None:
        return
    running: GradientSums | None = vars(layer).get("exact") if layer is not None else None
    if sums is running:
        sums.receive(parameter)
    # After wrapping again, the step of the newer wrapper runs.
    elif running is None or parameter not in running.hooked:
        parameter.grad = None  # it is not reduced, and a later `backward` would add to it
        name = name_of(parameter, sums.module.named_parameters())
        msg = f"under strategy 'exact' only `pardata.backward` must run a backward, but `{name}` "
        msg += "got another gradient: call backward(model, loss_fn, batch)"
        raise RuntimeError(msg)

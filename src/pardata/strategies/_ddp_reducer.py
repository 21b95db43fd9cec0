"""DDP's reducer: checks its parameters, resets it, adds a payload to its buckets.

Does not replace DDP's reduction, which stays PyTorch's.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pardata.model._torch_internals import name_of, parameters_of

# ruff: noqa: SLF001  # can go with a public reset after an error: pytorch/pytorch#114194

_AGAIN = "wrap again, model = wrap_model(unwrap(model))"


class ReducedParameters:
    """The parameters that DDP's reducer was built with.

    Attributes:
        parameters: the parameters whose gradients it reduces, in its order.
        sparse: for each of them, whether its gradient is sparse.
        text: a text of their layouts.
    """

    def __init__(
        self, model: DistributedDataParallel, parameters: list[nn.Parameter], sparse: list[bool]
    ) -> None:
        self.parameters, self.sparse = parameters, sparse
        self._layouts = _layouts(parameters)
        self.text = str([(dtype, *rest) for dtype, _, *rest in self._layouts.values()])
        # Held by reference, so that no other parameter gets the same id.
        others = {n: p for n, p in model.module.named_parameters() if id(p) not in self._layouts}
        self._others = {id(p): p for p in others.values()}
        self._ignored = {id(p) for name, p in others.items() if name in model.parameters_to_ignore}

    def are(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether these are the parameters, and have kept their layouts."""
        return self._layouts == _layouts(parameters)

    def check(self, model: DistributedDataParallel) -> None:
        """Raise if DDP would not synchronize a trained parameter.

        Raises:
            RuntimeError: a parameter was added, exchanged, converted, frozen or unfrozen.
        """
        for parameter in parameters_of(model.module):
            is_as_built = self._layouts.get(id(parameter), ())[:2] == _kind(parameter)
            if parameter.requires_grad and not (is_as_built or id(parameter) in self._ignored):
                raise self._error_of(parameter, model)
        trained = [parameter.requires_grad for parameter in self.parameters]
        takes_some = model.find_unused_parameters or model.static_graph
        if any(trained) and not (takes_some or all(trained)):
            raise self._error_of(self.parameters[trained.index(False)], model)

    def _error_of(self, parameter: nn.Parameter, model: DistributedDataParallel) -> RuntimeError:
        name, was = name_of(parameter, model.module.named_parameters()), self._layouts
        if id(parameter) not in was and id(parameter) not in self._others:
            return RuntimeError(
                f"under 'ddp' a model must keep its parameters, but `{name}` was added or "
                f"exchanged: {_AGAIN}, and make a new optimizer"
            )
        if parameter.requires_grad and id(parameter) in was:
            before, now = (
                f"{d} on {where}" for d, where in (was[id(parameter)][:2], _kind(parameter))
            )
            return RuntimeError(
                f"under 'ddp' a parameter must keep its dtype and device, but `{name}` was "
                f"{before} and is {now}: convert the model before wrap_model, or {_AGAIN}"
            )
        return RuntimeError(
            f"under 'ddp' a parameter must be frozen, or not, as when wrapped, but `{name}` is "
            f"not: {_AGAIN}, or wrap with find_unused_parameters=True and freeze it then"
        )


def _kind(parameter: Tensor) -> tuple[Any, ...]:
    return parameter.dtype, parameter.device


def _layouts(parameters: Iterable[Tensor]) -> dict[int, tuple[Any, ...]]:
    return {id(p): (*_kind(p), p.shape, p.stride()) for p in parameters}


def register_hook(model: Any, state: object, hook: Callable[..., Any]) -> None:
    """Register a communication hook; unlike with DDP's method, it is not pickled."""
    dist._register_comm_hook(model.reducer, state, hook)


def reset_reducer(model: Any) -> None:
    """Reset DDP's reducer after a forward without a backward, perhaps on this rank only.

    PyTorch would then rebuild the buckets, which is collective. So they stay as they are from now
    on.
    """
    if model._has_rebuilt_buckets:
        model.__dict__["_stays_arranged"] = True
    model.reducer._reset_state()


def renew_reducer(model: Any, *, as_built: bool = True) -> None:
    """Give DDP a new reducer with new buckets, as unpickling does.

    After an error, because pending collectives still write to the old buckets. On every rank,
    because the new ones have another arrangement.

    Args:
        model: the model in DDP.
        as_built: whether it reduces the same parameters, otherwise those that are trained now.
    """
    reduced = getattr(model, "_reduced", None) if as_built else None  # PyTorch's class has none
    built = (reduced.parameters, reduced.sparse) if reduced else model._build_params_for_reducer()
    model._has_rebuilt_buckets = False
    model.__dict__.pop("_stays_arranged", None)
    frozen = [parameter for parameter in built[0] if not parameter.requires_grad]
    for parameter in frozen:  # a reducer takes only trainable parameters
        parameter.requires_grad_(True)
    names = model._build_debug_param_to_name_mapping(built[0])
    model._ddp_init_helper(*built, names, model.static_graph)
    for parameter in frozen:
        parameter.requires_grad_(False)
    if model.static_graph:
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
        # In the first step it reduces in a callback at the end of the backward, which DDP queues
        # once.
        model.__dict__["_static_graph_delay_allreduce_enqueued"] = False
    model.__dict__.pop("_payload", None)  # its hook is registered with the old reducer
    for hook, state in model._comm_hooks:
        register_hook(model, state, hook)


# Elements: gradients up to this size are copied in less time than a collective takes.
SMALL = 2**17
_MOST_RANKS = 64  # above it the payload, about 100 numbers for each rank, is no longer small


class Payload:
    """Numbers that are reduced with the gradients, at the end of the first bucket.

    A separate collective would take as long as the one of a small model's gradients. Gradients of a
    large model take longer to copy, and PyTorch reduces them best without a hook.

    Gradients are summed in float32, which is not precise enough for a large count. So each rank has
    a slot for its float64 numbers, as 16-bit integers, to which the other ranks add zeros. That sum
    is exact, also for infinity and NaN.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.numbers: Tensor | None = None  # to send with the next bucket, float64 of shape (n,)
        self.received: Any = None

    def sums(self) -> Tensor:
        """Return the sums over all ranks, float64 of shape (n,), with the same bits on each."""
        return from_words(self.received, self.group.size()).sum(0)


def to_words(rows: Tensor, slots: int, first: int) -> Tensor:
    """Return float64 rows as 16-bit integers in float32, in slots from `first` on, of `slots`.

    Other ranks add zeros there, so that no sum rounds, and infinity and NaN keep their bits.
    """
    words = rows.flatten(1).view(torch.int16)
    places = torch.zeros(slots, words.shape[1], device=rows.device)
    places[first : first + len(words)] = words
    return places.view(-1)


def from_words(words: Tensor, slots: int) -> Tensor:
    """Return the rows of all slots, from the sums of words over ranks."""
    return words.to(torch.int16).view(slots, -1).view(torch.float64)


def _mean_with_payload(payload: Payload, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook: all-reduce a bucket to its mean, followed by the numbers of `payload`."""
    gradients, size = bucket.buffer(), payload.group.size()
    count, numbers = len(gradients), payload.numbers
    if numbers is None:
        sent = gradients.div_(size)
    else:
        words = to_words(numbers[None], size, payload.group.rank())
        sent = torch.cat([gradients.div_(size), words.to(gradients.dtype)])
        payload.numbers, payload.received = None, sent[count:]
    done = torch.futures.Future[Tensor]()
    if bucket.is_last():
        # In the last bucket there is nothing to overlap with, and a synchronous call saves a
        # thread.
        dist.all_reduce(sent, group=payload.group)
        done.set_result(sent[:count])
    else:
        work: Any = dist.all_reduce(sent, group=payload.group, async_op=True)
        done = work.get_future().then(lambda future: future.value()[0][:count])
    return done


def payload_for(model: DistributedDataParallel) -> Payload | None:
    """Register a payload's hook, if the model allows it. The result is the same on all ranks.

    None if the model is large or on a GPU, if it has a user's hook, or if gradients have fewer than
    32 bits.
    """
    parameters = list(model.module.parameters())
    wide = {p.dtype for p in parameters} <= {torch.float32, torch.float64}
    sparse = any(getattr(part, "sparse", False) for part in model.module.modules())
    small = sum(p.numel() for p in parameters) <= SMALL
    few = model.process_group.size() <= _MOST_RANKS
    # On a GPU launching the kernels that pack them takes longer.
    on_cpu = all(p.is_cpu for p in parameters)
    # Reducers that reduce each gradient separately, or all at the end of the backward.
    late = model._use_python_reducer or model._delay_all_reduce_all_params
    if small and few and wide and on_cpu and not (sparse or late):
        with suppress(RuntimeError):  # only one hook is possible, and the user has one
            payload = Payload(model.process_group)
            register_hook(model, payload, _mean_with_payload)
            return payload
    return None

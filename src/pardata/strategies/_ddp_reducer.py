"""DDP's reducer: its parameters, the numbers that travel with its buckets, equal gradients."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pardata.collectives._comm_errors import explain_comm_errors
from pardata.collectives._fingerprint import fingerprint_slots, fingerprints_match
from pardata.model._torch_internals import name_of, parameters_of

# ruff: noqa: SLF001  # a public way to begin anew after an error: pytorch/pytorch#114194

_AGAIN = "wrap again, model = wrap_model(unwrap(model))"


class ReducedParameters:
    """The parameters of a model as DDP's reducer has taken them down, once and for all.

    Attributes:
        parameters: whose gradients it reduces, in its order.
        sparse: which of them expect sparse gradients.
        trained: which of them were trainable at the last `check`.
    """

    def __init__(
        self, model: DistributedDataParallel, parameters: list[nn.Parameter], sparse: list[bool]
    ) -> None:
        self.parameters, self.sparse = parameters, sparse
        self.trained: tuple[bool, ...] = ()
        self._kinds = {id(parameter): _kind(parameter) for parameter in parameters}
        # Held by reference, or another parameter might get the same id.
        others = {n: p for n, p in model.module.named_parameters() if id(p) not in self._kinds}
        self._others = {id(p): p for p in others.values()}
        self._ignored = {id(p) for name, p in others.items() if name in model.parameters_to_ignore}

    def check(self, model: DistributedDataParallel) -> None:
        """Raise where DDP would not synchronise all that is trained.

        Raises:
            RuntimeError: for a parameter that was added, exchanged, converted, frozen or unfrozen.
        """
        for parameter in parameters_of(model.module):
            if (
                parameter.requires_grad
                and self._kinds.get(id(parameter)) != _kind(parameter)
                and id(parameter) not in self._ignored
            ):
                raise self._error_of(parameter, model)
        self.trained = tuple(parameter.requires_grad for parameter in self.parameters)
        takes_some = model.find_unused_parameters or model.static_graph
        if any(self.trained) and not (takes_some or all(self.trained)):
            raise self._error_of(self.parameters[self.trained.index(False)], model)

    def _error_of(self, parameter: nn.Parameter, model: DistributedDataParallel) -> RuntimeError:
        name, was = name_of(parameter, model.module.named_parameters()), self._kinds
        if id(parameter) not in was and id(parameter) not in self._others:
            return RuntimeError(
                f"a model must keep the parameters that it was wrapped with under 'ddp', which "
                f"synchronises no others, but `{name}` was added or exchanged: change the model "
                f"before wrap_model, or {_AGAIN}, and make a new optimizer"
            )
        if parameter.requires_grad and id(parameter) in was:
            before, now = (f"{d} on {where}" for d, where in (was[id(parameter)], _kind(parameter)))
            return RuntimeError(
                f"a parameter must keep the dtype and device that it was wrapped with under "
                f"'ddp', which does not synchronise it otherwise, but `{name}` was {before} and "
                f"is {now}: convert the model before wrap_model, or {_AGAIN}"
            )
        return RuntimeError(
            f"a parameter must be frozen, or not, as it was when the model was wrapped under "
            f"'ddp', which synchronises what was trainable then; but `{name}` is not: {_AGAIN}, "
            f"or wrap it while all is trainable, with find_unused_parameters=True, and freeze it "
            f"then"
        )


def _kind(parameter: Tensor) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def register_hook(model: Any, state: object, hook: Callable[..., Any]) -> None:
    """Register a communication hook that is not pickled with the model, as DDP's method would."""
    dist._register_comm_hook(model.reducer, state, hook)


def reset_reducer(model: Any) -> None:
    """Let DDP forget a backward that did not come to its end, perhaps on this rank alone.

    PyTorch would then arrange the buckets once more, which all ranks do together: from here on they
    are left as they are.
    """
    if model._has_rebuilt_buckets:
        model.__dict__["_stays_arranged"] = True
    try:
        model._check_reducer_finalized()
    except RuntimeError:  # what was sent still writes into the buckets: the next step needs others
        _renew_reducer(model)
    else:
        model.reducer._reset_state()


def _renew_reducer(model: Any) -> None:
    """Give DDP a reducer with new buckets, as it gets one when it is unpickled."""
    reduced = getattr(model, "_reduced", None)  # PyTorch's own class has none
    known = (reduced.parameters, reduced.sparse) if reduced else model._build_params_for_reducer()
    frozen = [parameter for parameter in known[0] if not parameter.requires_grad]
    for parameter in frozen:  # it takes only what is trainable
        parameter.requires_grad_(True)
    names = model._build_debug_param_to_name_mapping(known[0])
    model._ddp_init_helper(*known, names, model.static_graph)
    for parameter in frozen:
        parameter.requires_grad_(False)
    if model.static_graph:
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
        # In its first step it reduces at the end of the backward, which DDP asks for once.
        model.__dict__["_static_graph_delay_allreduce_enqueued"] = False
    model.__dict__.pop("_payload", None)  # it is registered with the old one
    for hook, state in model._comm_hooks:
        register_hook(model, state, hook)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element


def compare_gradients(named: Sequence[tuple[str, Tensor]], group: Any) -> None:
    """Raise on every rank if the gradient of a parameter differs between ranks. Collective.

    One small all-reduce compares a digest of the bits of all gradients. The host waits for it.

    Raises:
        RuntimeError: gradients differ; the error names the first parameter.
    """
    size, device = dist.get_world_size(group), named[0][1].device
    digests = torch.stack([_digest(parameter.grad, device) for _, parameter in named])
    with explain_comm_errors("comparing the gradients"):
        sums = torch.tensor(fingerprint_slots(str(digests.tolist()), size), device=device)
        dist.all_reduce(sums, group=group)
        if fingerprints_match(sums.tolist()):
            return
        of_ranks = [torch.empty_like(digests) for _ in range(size)]
        dist.all_gather(of_ranks, digests, group=group)
    differs = (torch.stack(of_ranks) != of_ranks[0]).any(0).tolist()
    raise RuntimeError(
        f"every rank must have the same gradients after a synchronised backward, but that of "
        f"`{named[differs.index(True)][0]}` differs between ranks ({sum(differs)} of {len(named)} "
        f"parameters differ), so that the replicas would drift apart: pass use_reentrant=False to "
        f"torch.utils.checkpoint, call the wrapped model and no module inside it, and change no "
        f"gradient before the backward has ended"
    )


@torch.no_grad()
def _digest(gradient: Tensor | None, device: torch.device) -> Tensor:
    """Return the sum of the bits of a gradient as whole numbers, which no order can change."""
    if gradient is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values) if values.is_complex() else values
    if values.element_size() > 1:
        values = values.nan_to_num(posinf=torch.inf, neginf=-torch.inf)  # NaN has many bit patterns
    bits = values.contiguous().view(_BITS[values.element_size()])
    return bits.sum(dtype=torch.int64).to(device)


_SMALL = 2**17  # numbers: gradients that are copied in less time than a collective takes
_MOST_RANKS = 64  # by which what travels with them, some 100 numbers for each, is no longer small


class Payload:
    """Numbers that travel with the gradients, at the end of the bucket that is reduced first.

    A collective of their own would take as long as that of a small model's gradients. A large
    model's take longer to copy than that, and PyTorch reduces them best without a hook.

    Gradients are added in float32, which is not enough for a time or a large count. So each rank's
    float64 numbers have places of their own, as whole numbers of 16 bits. The other ranks add zeros
    to them: that is exact, also for what is infinite or NaN.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.numbers: Tensor | None = None  # to be sent with the next bucket
        self.received: Any = None

    def sums(self) -> Tensor:
        """Return the sums of what all ranks have told, the same on all to the bit."""
        words: Tensor = self.received.to(torch.int16)
        return words.view(torch.float64).view(self.group.size(), -1).sum(0)


def _mean_with_payload(payload: Payload, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket as DDP does, to the mean over the ranks; and the numbers of `payload`."""
    gradients, size = bucket.buffer(), payload.group.size()
    count, numbers = len(gradients), payload.numbers
    if numbers is None:
        sent = gradients.div_(size)
    else:
        words = numbers.view(torch.int16)
        places = gradients.new_zeros(size, len(words))
        places[payload.group.rank()] = words
        sent = torch.cat([gradients.div_(size), places.view(-1)])
        payload.numbers, payload.received = None, sent[count:]
    done = torch.futures.Future[Tensor]()
    if bucket.is_last():
        # Nothing is left to be computed meanwhile, and to wait here takes one thread less.
        dist.all_reduce(sent, group=payload.group)
        done.set_result(sent[:count])
    else:
        work: Any = dist.all_reduce(sent, group=payload.group, async_op=True)
        done = work.get_future().then(lambda future: future.value()[0][:count])
    return done


def payload_for(model: DistributedDataParallel) -> Payload | None:
    """Arrange what carries numbers with the gradients, if that can be. The same on all ranks.

    It cannot if the model is large or on a GPU, if the user has registered a hook, or if gradients
    have too few digits.
    """
    parameters = list(model.module.parameters())
    wide = {p.dtype for p in parameters} <= {torch.float32, torch.float64}
    sparse = any(getattr(part, "sparse", False) for part in model.module.modules())
    small = sum(p.numel() for p in parameters) <= _SMALL
    few = model.process_group.size() <= _MOST_RANKS
    on_cpu = all(p.is_cpu for p in parameters)  # a GPU takes longer to launch what packs them
    # Each gradient alone, or all at the end of a backward.
    late = model._use_python_reducer or model._delay_all_reduce_all_params
    if small and few and wide and on_cpu and not (sparse or late):
        with suppress(RuntimeError):  # there can be one hook, and the user has his own
            payload = Payload(model.process_group)
            register_hook(model, payload, _mean_with_payload)
            return payload
    return None

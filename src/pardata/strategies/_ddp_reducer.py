"""DDP's reducer: the parameters that it was made for, and a new one after a failed backward."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pardata.model._modules import name_of, parameters_of

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


def reduces_late(model: Any) -> bool:
    """Return whether DDP reduces each gradient alone, or all at the end of a backward."""
    return bool(model._use_python_reducer or model._delay_all_reduce_all_params)


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
    model.__dict__.pop("_parcel", None)  # it is registered with the old one
    for hook, state in model._comm_hooks:
        register_hook(model, state, hook)

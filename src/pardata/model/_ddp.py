"""Strategy "ddp": PyTorch's DistributedDataParallel, reading through, with equal buffers."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import _JoinConfig
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from pardata.model._buffers import broadcast
from pardata.model._read_through import ReadThrough
from pardata.model._uneven_shares import warn_of_uneven_shares

_SMALL = 2**17  # numbers: gradients that are copied in less time than a collective takes


class ReadThroughDDP(ReadThrough, DistributedDataParallel):
    """`DistributedDataParallel` that reads through, with equal buffers after every step."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        # Not as attributes are set, which are the module's from here on.
        self.__dict__.update(_in_step=False, _forward_runs=False, _expects_backward=False)
        self._assign_modules_buffers()  # PyTorch does not where it delays all its reductions
        if options.get("init_sync", True):
            self._broadcast_buffers()  # older PyTorch does not do it when its flag is off

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; after a training forward that will synchronise, equalise the buffers.

        PyTorch broadcasts them before the *next* forward, so that healthy ranks differ in between
        and an evaluation communicates. This is the same broadcast, at the other end.
        """
        self.__dict__["_forward_runs"] = True
        try:
            output = super().forward(*inputs, **kwargs)
        except Exception as error:
            self._name_unused(error)
            self._name_empty_share(error, (inputs, kwargs))
            raise
        finally:
            self.__dict__["_forward_runs"] = False
        trains = torch.is_grad_enabled() and self.require_backward_grad_sync
        if trains and not self._in_step and not self._join_config.enable:
            self.__dict__["_expects_backward"] = True
            if self._inside.training:
                warn_of_uneven_shares()
            self._equalise_buffers()
        return output

    def _equalise_buffers(self) -> None:
        # The mode is the module's: unwrap(model).train() does not reach the wrapper.
        if self.broadcast_buffers and self.modules_buffers and self._inside.training:
            self._broadcast_buffers()

    def will_sync_module_buffers(self) -> bool:
        """Leave the buffers to PyTorch inside ``join()``: ranks that have finished follow it."""
        return bool(self._join_config.enable and super().will_sync_module_buffers())

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        super()._sync_final_model(is_last_joiner)
        # PyTorch leaves it on, and every later forward would communicate.
        self._join_config = _JoinConfig.construct_disabled_join_config()

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register on the module: there it is saved, and kept equal on all ranks."""
        super().register_buffer(name, tensor, persistent)
        self._assign_modules_buffers()

    @cached_property
    def _parcel(self) -> "Parcel | None":
        """What carries numbers with the gradients, if that can be; arranged the first time."""
        parameters = list(self.module.parameters())
        wide = {p.dtype for p in parameters} <= {torch.float32, torch.float64}
        sparse = any(getattr(part, "sparse", False) for part in self.module.modules())
        delayed = self._use_python_reducer or self._delay_all_reduce_all_params
        small = sum(p.numel() for p in parameters) <= _SMALL
        one_device = len({p.device for p in parameters}) == 1
        if small and wide and one_device and not (sparse or delayed):
            with suppress(RuntimeError):  # there can be one hook, and the user has his own
                parcel = Parcel(self.process_group)
                # Not by the method, which keeps what is registered and would pickle it.
                dist._register_comm_hook(self.reducer, parcel, _mean_with_parcel)  # noqa: SLF001
                return parcel
        return None

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state.pop("_parcel", None)  # of the reducer, which is made anew
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Not transparent yet: PyTorch's __setstate__ sets attributes of the wrapper.
        state = {name: value for name, value in state.items() if name != "_transparent"}
        super().__setstate__(state)
        self.__dict__["_transparent"] = True

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        # In the order of DDP's numbers, and now: what is frozen later keeps its number.
        self.__dict__["_reduced"], sparse = super()._build_params_for_reducer()
        return self._reduced, sparse

    @torch._disable_dynamo  # noqa: SLF001  # torch.compiler.disable would import all of dynamo
    def _broadcast_buffers(self) -> None:
        ignored = self.parameters_to_ignore
        buffers = (b for name, b in self.module.named_buffers() if name not in ignored)
        broadcast(buffers, self.process_group)

    def _name_unused(self, error: Exception) -> None:
        """Raise in place of an error of DDP about unused parameters, which gives numbers only."""
        if "did not receive grad" not in str(error):
            return
        listed = re.search(r"indices which did not receive grad for rank \d+:([ \d]+)", str(error))
        indices = [int(text) for text in listed[1].split()] if listed else []
        names_of = {parameter: name for name, parameter in self.module.named_parameters()}
        names = ", ".join(f"`{names_of[self._reduced[index]]}`" for index in indices)
        raise RuntimeError(
            f"every parameter must take part in the loss, but {names or 'some'} did not in the "
            f"last step, so its gradient was not synchronised: use all outputs in the loss, "
            f"freeze what is not trained (requires_grad_(False)), or pass "
            f"wrap_model(..., find_unused_parameters=True)"
        ) from error

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, MethodType) and value.__self__ is self._inside:
            return self._refusing_forwards(name)(value)
        return value

    @contextmanager  # which decorates, too
    def _refusing_forwards(self, name: str) -> Iterator[None]:
        """Raise in a block, or a method, that trains submodules whose gradients nobody syncs."""

        def refuse(module: nn.Module, _args: object) -> None:
            if self._forward_runs or not torch.is_grad_enabled():
                return
            # A checkpointed part runs again in the backward of a forward that was in order.
            if torch._C._current_graph_task_id() >= 0:  # noqa: SLF001  # torch has no public name
                return
            trains = any(parameter.requires_grad for parameter in module.parameters())
            if trains and any(own is module for own in self.module.modules()):
                raise RuntimeError(
                    f"`{name}` must not train through DistributedDataParallel, but it runs "
                    f"{type(module).__name__} with gradients, which would not be synchronised: "
                    f"call it from the model's forward, or under torch.no_grad() if nothing is "
                    f"trained, or as unwrap(model).{name} if the ranks shall differ"
                )

        # One global hook for the time of the call costs the same for a module of any size.
        handle = register_module_forward_pre_hook(refuse)
        try:
            yield
        finally:
            handle.remove()


class Parcel:
    """Numbers that travel with the gradients, at the end of the bucket that is reduced first.

    A collective of their own would take as long as that of a small model's gradients. A large
    model's take longer to copy than that, and PyTorch reduces them best without a hook.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.numbers: Tensor | None = None  # to be sent with the next bucket
        self.sums: Any = None


def _mean_with_parcel(parcel: Parcel, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket as DDP does, to the mean over the ranks; and the numbers of `parcel`."""
    gradients, size = bucket.buffer(), parcel.group.size()
    count, numbers = len(gradients), parcel.numbers
    if numbers is None:
        sent = gradients.div_(size)
    else:
        sent = gradients.new_empty(count + len(numbers))
        torch.div(gradients, size, out=sent[:count])
        sent[count:] = numbers
        parcel.numbers, parcel.sums = None, sent[count:]
    done = torch.futures.Future[Tensor]()
    if bucket.is_last() and not sent.is_cuda:
        # Nothing is left to be computed meanwhile, and to wait here takes one thread less.
        dist.all_reduce(sent, group=parcel.group)
        done.set_result(sent[:count])
    else:
        work: Any = dist.all_reduce(sent, group=parcel.group, async_op=True)
        done = work.get_future().then(lambda future: future.value()[0][:count])
    return done


def parcel_of(model: DistributedDataParallel) -> Parcel | None:
    """Return what carries numbers with the gradients of the backward to come, if that can be.

    It cannot where the model is large or the user has registered a hook, with PyTorch's own class,
    and where gradients have too few digits. The same on all ranks.
    """
    return model._parcel if isinstance(model, ReadThroughDDP) else None  # noqa: SLF001  # a public name would hide the module's


@contextmanager
def one_step(model: DistributedDataParallel, forwards: int) -> Iterator[None]:
    """Take what runs in the block, so many forwards at most on a rank, for one step. Collective.

    At its end all gradients must have been reduced; then the buffers are equalised.
    """
    if model.__dict__.pop("_expects_backward", False) and forwards > 1:
        # After a forward that no backward has followed, as of an evaluation without no_grad(),
        # PyTorch would reduce in the next backward, no_sync() or not, and not on every rank.
        model.reducer._reset_state()  # noqa: SLF001  # torch has no public name
    model.__dict__["_in_step"] = True  # nn.Module's way to set an attribute takes longer
    try:
        yield
        # Now: the next collective would meet what other ranks still reduce.
        model._check_reducer_finalized()  # noqa: SLF001  # torch has no public name
    except RuntimeError as error:
        if isinstance(model, ReadThroughDDP):
            model._name_unused(error)  # noqa: SLF001  # a public name would hide the module's
        raise
    finally:
        model.__dict__["_in_step"] = False
        if (parcel := model.__dict__.get("_parcel")) is not None:
            parcel.numbers = None  # of a step that has failed
    if isinstance(model, ReadThroughDDP):
        model._equalise_buffers()  # noqa: SLF001  # likewise

"""Strategy "exact": training with the same bits at every world size.

Does not keep the bits between different kernels: processors, torch versions, numbers of threads.
Only `backward` sets gradients. A hook on each parameter adds a microbatch's gradient to the sums,
and raises in any other backward (`_gradient_sums`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pardata._validation import check_int
from pardata.environment._device import checked_device
from pardata.model._torch_internals import sync_batch_norms, versions_of
from pardata.model._transparent import TransparentWrapper
from pardata.model._unwrap import Wrapper, unwrap
from pardata.store._round import Facts
from pardata.strategies._forward import active_model, check_nested
from pardata.strategies._strategy import Strategy, WrapOptions, broadcast_weights
from pardata.strategies.exact._exact_step import ExactStep
from pardata.strategies.exact._gradient_sums import GradientSums
from pardata.strategies.exact._numerics import numerics_error, numerics_record

_RECORD = "exact"  # the key of the record in the metadata of a state dict


class ExactModel(TransparentWrapper, Wrapper):
    """A wrapper of a module whose gradients only `pardata.backward` sets.

    Args:
        module: the module to train.
        threads: number of threads of PyTorch's CPU kernels, on which sums depend. It is set for the
            whole process.

    Attributes:
        exact: the sums of its gradients.
    """

    exact: GradientSums

    def __init__(self, module: nn.Module, *, threads: int = 1) -> None:
        # By `__dict__`, because attributes belong to the module after wrapping.
        self.__dict__["exact"] = GradientSums(unwrap(module), threads)
        super().__init__(module)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if active_model() not in (None, self):
            check_nested(self.module)
        return self.module(*inputs, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state dict, with a record of the numerics in its metadata."""
        state = super().state_dict(*args, **kwargs)
        metadata = versions_of(state)
        if metadata:
            # With a prefix if this is a child of the module whose state is taken.
            path = (args[1] if len(args) > 1 else kwargs.get("prefix", ""))[:-1]
            device = next(self.parameters()).device
            metadata[path] = {**metadata.get(path, {}), _RECORD: numerics_record(device)}
        return state

    def check_versions(self, facts: Mapping[str, Any]) -> None:
        """Raise for weights of an exact run with other numerics, because the bits would differ."""
        then = facts.get(_RECORD)
        if then is None:
            return
        now = numerics_record(next(self.parameters()).device)
        if differ := [name for name in now if then.get(name) != now[name]]:
            diff = ", ".join(f"{key} was {then.get(key)!r} and is {now[key]!r}" for key in differ)
            raise ValueError(
                f"an exact run must keep its kernels, but {diff}: resume where it began, with its "
                f"threads=… and precisions, or load into unwrap(model) for a run that is not exact"
            )


class ExactStrategy(Strategy):
    name = "exact"
    step = ExactStep
    wrapper = ExactModel
    needs_group = False

    def check(self, model: nn.Module, settings: WrapOptions) -> None:
        if settings.sync_batchnorm or sync_batch_norms(model):
            msg = "`sync_batchnorm` must be False under strategy 'exact': make the model without it"
            raise ValueError(msg)
        check_int("threads", settings.options.get("threads", 1), least=1)

    def facts(self, model: nn.Module, settings: WrapOptions) -> Facts:
        threads, device = settings.options.get("threads", 1), checked_device(self.device(settings))
        torch.set_num_threads(threads if device.type == "cpu" else torch.get_num_threads())
        if refusal := numerics_error(model, threads):
            raise refusal
        return numerics_record(device)

    def wrap(self, model: nn.Module, settings: WrapOptions) -> nn.Module:
        if settings.world.size > 1:
            broadcast_weights(model)
        return ExactModel(model, **settings.options)

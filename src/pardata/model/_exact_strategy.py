"""Strategy "exact": how it wraps, and what its state dicts record."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from pardata.collective._agreement import Facts, agree, require_same
from pardata.model._batch_norm import is_synchronised
from pardata.model._exact import ExactModel, check_kernels, kernels
from pardata.model._replication import Settings, Strategy, broadcast_weights
from pardata.model._unwrap import layers
from pardata.ranks._logger import get_logger

_log = get_logger(__name__)


class Exact(Strategy):
    """Strategy "exact"."""

    name = "exact"
    wrapper = ExactModel

    def options_of(self) -> Callable[..., object]:
        return ExactModel

    def check(self, model: nn.Module, settings: Settings) -> None:
        super().check(model, settings)
        if settings.sync_batchnorm or any(map(is_synchronised, model.modules())):
            msg = (
                "`sync_batchnorm` must be False under strategy 'exact', but is True or was before: "
                "make the model anew without it, for there batch norm takes the statistics of each "
                "microbatch, which are the same at every world size"
            )
            raise ValueError(msg)

    def wrap(self, model: nn.Module, settings: Settings) -> nn.Module:
        wrapped = ExactModel(model, **settings.options)

        def checked() -> Facts:
            check_kernels(model)
            return kernels(wrapped)

        place = "wrap_model(strategy='exact')"
        cure = "Start on machines and with versions that are alike, or use strategy 'ddp'."
        require_same(place, agree(settings.here, place, checked), cure)
        if settings.here.size > 1:
            broadcast_weights(model)
        _log.info(
            "strategy 'exact' computes with %d thread(s) on each rank, whatever their number",
            torch.get_num_threads(),
            once=True,
        )
        return wrapped

    def state_dict(self, model: nn.Module) -> Mapping[str, Any]:
        # With the wrapper's record in it of the kernels by which it was trained.
        wrapper = next(layer for layer in layers(model) if isinstance(layer, ExactModel))
        state: Mapping[str, Any] = wrapper.state_dict()
        return state

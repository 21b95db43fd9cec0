"""Strategy "none": the module itself."""

from torch import nn

from pardata.environment._logger import get_logger
from pardata.strategies._strategy import Strategy, WrapOptions

_log = get_logger(__name__)


class NoneStrategy(Strategy):
    name = "none"
    is_collective = needs_group = False

    def wrap(self, model: nn.Module, settings: WrapOptions) -> nn.Module:
        if settings.world.size > 1:
            text = "under strategy 'none' each of the %d ranks trains a model of its own"
            _log.warning(text, settings.world.size, ranks=[0], once=True)
        return model

"""Strategy "exact_fsdp": sharded parameters, and the bits of "exact"."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pardata.collective._agreement import Facts
from pardata.model._sharding import reshard
from pardata.model._state_dict import load_sharded
from pardata.ranks._device import checked_device
from pardata.strategies._fsdp import check_sharded, named_blocks, shard
from pardata.strategies._strategy import Settings
from pardata.strategies.exact._elementwise import refuse_mixing_optimizers
from pardata.strategies.exact._exact import ExactModel, ExactStrategy
from pardata.strategies.exact._exact_step import ExactStep
from pardata.strategies.exact._sharded_sums import ShardedSums


class ExactFsdpStep(ExactStep):
    """As "exact", but forward and backward are collective, and gradients are sent in each of them.

    So all ranks run equally many, and an error of one rank alone leaves the others waiting.
    """

    equally_many = strided = True
    wrong_shares = (
        "`batch` must hold strided microbatches under strategy 'exact_fsdp', but holds a run of "
        "them: pass strided=True to make_loader, or to Microbatches.of"
    )

    @contextmanager
    def whole(self) -> Iterator[None]:
        check_sharded(self.module, self.size, ExactFsdpStrategy.name)
        # Each in the round of its number: at last placeholders, for those that there are not.
        self.share.microbatches.sort(key=lambda microbatch: microbatch.number < 0)
        reshard(self.module)  # what a forward without a backward has left
        with super().whole():
            yield

    def run(self, loss: Tensor, part: float) -> None:
        self._sums.watch()
        super().run(loss, part)


class ExactShards(ExactModel):
    """A module that ``fully_shard`` has sharded, and whose gradients only `backward` makes."""

    _load = staticmethod(load_sharded)
    _sums_of = ShardedSums


class ExactFsdpStrategy(ExactStrategy):
    name = "exact_fsdp"
    step = ExactFsdpStep
    wrapper = ExactShards
    places_model = True
    own_options = frozenset({"blocks", "reshard_after_forward"})

    def check(self, model: nn.Module, settings: Settings) -> None:
        super().check(model, settings)
        from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415  # half a second

        if settings.here.size > 1 and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise RuntimeError(
                f"strategy 'exact_fsdp' on several ranks needs torch 2.13, whose fully_shard takes "
                f"another reduction, but this is {torch.__version__}: install a newer one, or use "
                f"'exact'"
            )

    def facts(self, model: nn.Module, settings: Settings) -> Facts:
        return {**super().facts(model, settings), **named_blocks(model, settings)}

    def wrap(self, model: nn.Module, settings: Settings) -> nn.Module:
        options = {**settings.options}
        threads = options.pop("threads", 1)
        target = checked_device(self.device(settings))
        if settings.here.size == 1:  # nothing to shard
            return super().wrap(model.to(target), settings._replace(options={"threads": threads}))
        options.pop("blocks", None)
        module = shard(model, settings, target, lambda part: {**options, **_in_full(part)})
        refuse_mixing_optimizers(module)
        return ExactShards(model, threads=threads)

    load = staticmethod(load_sharded)


def _in_full(part: nn.Module) -> dict[str, Any]:
    """Return the option of ``fully_shard`` by which gradients of 16 bits are added in 32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415  # half a second

    is_half = any(one.is_floating_point() and one.itemsize == 2 for one in part.parameters())
    return {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)} if is_half else {}

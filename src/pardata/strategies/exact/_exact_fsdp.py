"""Strategy "exact_fsdp": sharded parameters, and the bits of "exact"."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from pardata.model._before import AsFound
from pardata.model._sharding import forget_step, reshard, shard_again
from pardata.model._state_dict import LoadedKeys, load_sharded
from pardata.model._unwrap import unwrap
from pardata.strategies._old_optimizers import refuse_old_optimizers
from pardata.strategies._strategy import Settings, broadcast_weights
from pardata.strategies.exact._exact import ExactModel, ExactStrategy
from pardata.strategies.exact._exact_step import ExactStep, of_compiler
from pardata.strategies.exact._sharded_sums import ShardedSums


class ExactFsdpStep(ExactStep):
    """As "exact", but gradients are sent with each microbatch, and every forward is collective.

    So all ranks run equally many, and an error of one rank alone is no step of the others.
    """

    equally_many = True
    strided = True
    wrong_shares = (
        "`batch` must hold strided microbatches under strategy 'exact_fsdp', but holds a run of "
        "them: pass strided=True to make_loader, or to Microbatches.of"
    )

    @contextmanager
    def whole(self) -> Iterator[None]:
        # Each in the round of its number, and placeholders for those that there are not.
        self.pieces.own.sort(key=lambda piece: piece.number < 0)
        reshard(self.module)  # what a forward without a backward has left
        with AsFound(self.module):
            self._begin()
            try:
                with self._guests:
                    self._ask(failed=self._refusal is not None)
                    self._agreed(self._refusal)
                    yield
                    self._conclude(None)
            except BaseException as error:
                forget_step(self.module)
                if isinstance(error, Exception) and (told := of_compiler(error)) is not error:
                    raise told from error
                raise
            finally:
                self._sums.end_step()

    def _sums_for(self, trained: dict[str, nn.Parameter]) -> Any:
        self._exact.train(trained)
        return self._exact

    def run(self, loss: Tensor, part: float) -> None:
        self._sums.watch()
        super().run(loss, part)


class ExactShards(ExactModel):
    """A module that ``fully_shard`` has sharded, and whose gradients only `backward` makes."""

    def _made_for(self, module: nn.Module, threads: int) -> Any:
        return ShardedSums(module, threads)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> LoadedKeys:
        """Load as `load_weights` does. Collective."""
        return load_sharded(self, state_dict, strict=strict, assign=assign)


def _sharded(module: nn.Module, *, blocks: Any = (), mesh: Any, **options: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for part in (*blocks, module):
        kinds = {p.dtype for p in part.parameters() if not hasattr(p, "device_mesh")}
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if any(k.itemsize == 2 for k in kinds) else None)
        fully_shard(part, mesh=mesh, mp_policy=policy, **options)


class ExactFsdpStrategy(ExactStrategy):
    name = "exact_fsdp"
    step = ExactFsdpStep
    wrapper = ExactShards
    load = staticmethod(load_sharded)

    def options_of(self) -> Callable[..., object]:
        return lambda *, blocks, threads: None

    def wrap(self, model: nn.Module, settings: Settings) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        threads = settings.options.get("threads", 1)
        if settings.here.size == 1:
            return super().wrap(model, settings._replace(options={"threads": threads}))
        broadcast_weights(model)
        module = unwrap(model)
        mesh = init_device_mesh(next(model.parameters()).device.type, (settings.here.size,))
        before = [ref(parameter) for parameter in module.parameters()]
        _sharded(module, mesh=mesh)
        refuse_old_optimizers(module, before)
        module.register_forward_hook(shard_again)
        return ExactShards(model, threads=threads)

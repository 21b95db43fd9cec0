"""Strategy "fsdp": PyTorch's fully_shard, in place, with equal buffers."""

from collections.abc import Callable

import torch
from torch import nn

from pardata.model._buffers import EqualBuffers
from pardata.model._replication import (
    Settings,
    Strategy,
    broadcast_weights,
    with_batch_norms,
)
from pardata.model._state_dict import LoadedKeys, load_sharded
from pardata.model._unwrap import ShardedModule, unwrap


class Sharded(Strategy):
    """Strategy "fsdp"."""

    name = "fsdp"
    wrapper = ShardedModule
    needs_group = True
    takes_sharded_parts = True

    def options_of(self) -> Callable[..., object]:
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # half a second

        return fully_shard

    def wrap(self, model: nn.Module, settings: Settings) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  # as above
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # as above

        model = with_batch_norms(model, settings)
        kind = next(model.parameters()).device.type
        if kind == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):  # torch 2.6
            msg = (
                f"strategy 'fsdp' on a CPU needs a newer torch, but this is {torch.__version__}, "
                f"whose fully_shard needs a GPU: install a newer one, or use 'ddp'"
            )
            raise RuntimeError(msg)
        # fully_shard shards what each rank has; unlike DDP it does not begin from rank 0's weights.
        broadcast_weights(model)
        size, module = settings.here.size, unwrap(model)
        # Inside torch.compile, as PyTorch advises: names and hooks are then those of the module.
        fully_shard(module, **{"mesh": init_device_mesh(kind, (size,)), **settings.options})
        if size > 1:
            module.register_forward_hook(EqualBuffers())
        return model

    def load(
        self, model: nn.Module, state_or_path: object, *, strict: bool, assign: bool
    ) -> LoadedKeys:
        return load_sharded(unwrap(model), state_or_path, strict=strict, assign=assign)

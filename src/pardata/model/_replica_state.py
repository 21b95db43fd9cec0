"""The state of a replica: weights, modes, seed, as a text that ranks compare in each step.

Does not compare buffers, which a step makes equal.
"""

import zlib
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pardata.environment._world import store_client
from pardata.model._torch_internals import has_comm_hook, modules_and_parameters
from pardata.model._unwrap import unwrap
from pardata.rng._seeds import run_seed
from pardata.store._round import Facts, FactsOf, raise_if_different, require_equal

CHECK_EVERY = 64  # steps: weights are compared in steps 1, 2, 4 … 32, and in each 64th
_TRAINED = attrgetter("requires_grad")
_STATE = "_pardata_replica_state"  # an attribute of the layer that belongs to a model's strategy
_CURE = (
    "Call `backward` for each step of one loader, and let `loss_fn` return the same structure. "
    "Load and initialize weights, choose modes, frozen parameters, learning rates and seeds, step "
    "the optimizer, and run batch norm outside of `backward`, in the same way on every rank. For "
    "other random numbers on each rank call seed_everything(seed, per_rank=True)."
)


class ReplicaState:
    """What a step of a replica depends on: weights, modes, trained parameters, the run's seed.

    The steps of a model compare it between ranks, as a text that each rank sends in any case.

    Args:
        layer: the layer that belongs to the model's strategy.

    Attributes:
        step: the number of steps that have begun.
        structure: the structure of metrics that ranks have last compared, for `StepMetrics`; None
            before the first step.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.step = 0
        self.structure: str | None = None
        self._layer: Any = ref(layer)
        self._flags: list[object] = []
        self._text = ""

    def __reduce__(self) -> tuple[object, ...]:
        return ReplicaState, (self._layer(),)

    @classmethod
    def of(cls, layer: nn.Module) -> "ReplicaState":
        """Return the state of the model with this layer."""
        state: ReplicaState | None = vars(layer).get(_STATE)
        if state is None:
            state = vars(layer)[_STATE] = cls(layer)
        return state

    @property
    def is_due(self) -> bool:
        """Whether the weights are compared in this step."""
        is_early = self.step < CHECK_EVERY and self.step.bit_count() == 1
        return is_early or self.step % CHECK_EVERY == 0

    def text(self) -> str:
        """Return a text of the state, the same on every rank if that is.

        It has the digests of weights on a CPU if they are due.
        """
        due = self.is_due
        if due or not self._flags:
            parts, self._params = modules_and_parameters(unwrap(self._layer()))
            self._attributes = [vars(part) for part in parts]  # half the time of reading a module
        # A part that torch.compile wraps has no mode, but the module inside has.
        flags: list[object] = [held.get("training") for held in self._attributes]
        flags += map(_TRAINED, self._params)
        flags.append(run_seed.seed)
        if flags != self._flags:
            self._flags, self._text = flags, str(zlib.crc32(repr(flags).encode()))
        if not due:
            return self._text
        weights = replicated(self._layer()).values()
        return f"{self._text} {[int(digest_of(weight)) for weight in weights if weight.is_cpu]}"

    def differs_on_device(self, group: Any) -> Tensor | None:
        """Return whether weights on an accelerator differ between ranks, as a tensor there.

        Collective if they are due, and the host does not wait. None if they are not, or on a CPU.
        """
        weights = replicated(self._layer()).values() if self.is_due else ()
        digests = [digest_of(weight) for weight in weights if not weight.is_cpu]
        if not digests:
            return None
        # The sum of squares of W equal numbers is W times the square; 20 bits do not overflow.
        hashes = torch.stack([each.to(digests[0].device) for each in digests]) % 2**20
        sums = torch.stack([hashes, hashes * hashes])
        dist.all_reduce(sums, group=group)
        return (sums[0] * sums[0] != sums[1] * dist.get_world_size(group)).any()

    def facts(self) -> Facts:
        """Return the state in full. On an accelerator the host waits."""
        module = unwrap(self._layer())
        return {
            "the seed of seed_everything": run_seed.seed,
            **{f"{name}.training".lstrip("."): m.training for name, m in module.named_modules()},
            **{f"{name}.requires_grad": p.requires_grad for name, p in module.named_parameters()},
            **{name: f"bits {bits_of(p)}" for name, p in replicated(self._layer()).items()},
        }

    def compare(self, call: str, more: FactsOf = dict) -> None:
        """Raise on every rank, with a table, if the state or `more` differs. Collective."""
        cure = f"This is step {self.step} of the model. {_CURE}"
        differ = partial(raise_if_different, call, cure=cure, must="have the same in")
        require_equal(store_client(), call, lambda: {**more(), **self.facts()}, differ)

    def raise_difference(self, call: str, more: FactsOf = dict) -> None:
        """Raise on every rank, after texts have differed. Collective."""
        size = dist.get_world_size(getattr(self._layer(), "process_group", None))
        if size == dist.get_world_size():  # a smaller group has no store
            self.compare(call, more)
        raise RuntimeError(f"every rank must have the same in `{call}`, but one did not: {_CURE}")


def replicated(layer: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that must be the same on every rank, by name.

    It leaves out those in DDP's `parameters_to_ignore`, and tensors of another class, as sharded
    and quantized ones. With a user's communication hook replicas may differ, so there are none.
    """
    if has_comm_hook(layer):
        return {}
    names = getattr(layer, "parameters_to_ignore", ())
    # By object, because the names have a prefix if the module is compiled.
    others = {p for n, p in layer.module.named_parameters() if n in names} if names else set()
    named = unwrap(layer).named_parameters()
    return {n: p for n, p in named if type(p) is nn.Parameter and p not in others}


def bits_of(tensor: Tensor) -> str:
    """Return a text that is the same for equal bits."""
    dense = tensor.layout == torch.strided
    return f"{int(digest_of(tensor if dense else tensor.to_dense())) % 2**64:016x}"


@torch.no_grad()
def digest_of(tensor: Tensor) -> Tensor:
    """Return a hash of the bits of a dense tensor, an int64 of shape () on its device.

    It is a sum of the bits as integers, in which each row has another weight.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not real.numel():
        return torch.zeros((), dtype=torch.int64, device=real.device)
    bits = real.contiguous().view(getattr(torch, f"int{8 * real.element_size()}"))
    rows = bits.reshape(len(real) if real.ndim else 1, -1).sum(1, dtype=torch.int64)
    return (rows * torch.arange(1, len(rows) + 1, device=rows.device)).sum()

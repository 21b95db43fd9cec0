"""Compares gradients over the ranks: replicas with different gradients drift apart."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pardata.collectives._comm_errors import explain_comm_errors
from pardata.collectives._fingerprint import fingerprint_slots, fingerprints_match

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
        if fingerprints_match(sums.tolist(), size):
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

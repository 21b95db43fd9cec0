"""What the ranks tell each other at the end of an exact step, in one message."""

import math
from dataclasses import dataclass
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor

from pardata.gradient import _fixed_point


@dataclass(frozen=True)
class Report:
    """Of all ranks together.

    Attributes:
        overflow: what could not be added, and the largest of it, by name.
        large: what needs high words.
        used: which parameters have had a gradient.
        sparse: which had a sparse one.
        late: of each bucket, whether something was left when it had been sent.
        first: the number of the first microbatch that counts.
        failed: whether a rank ended in an error.
    """

    overflow: dict[str, float]
    large: set[str]
    used: set[str]
    sparse: set[str]
    late: list[bool]
    first: int
    failed: bool


def exchanged(
    names: list[str],
    peaks: Tensor,
    used: set[str],
    sparse: set[str],
    late: list[bool],
    *,
    first: int,
    failed: bool,
    size: int,
) -> Report:
    """Tell the others, and return what all say. Collective: a maximum of each number.

    Args:
        names: of what is added.
        peaks: of each of them, the largest here.
        used: as `Report` has it, of this rank, like all that follow.
        sparse: likewise.
        late: likewise.
        first: likewise.
        failed: likewise.
        size: how many ranks there are.
    """
    table = torch.stack(
        [
            # The maximum of NaN and a number is not NaN with every backend.
            torch.nan_to_num(peaks, nan=0.0, posinf=torch.inf),
            peaks.isnan().double(),
            peaks.new_tensor([name in used for name in names]),
            peaks.new_tensor([name in sparse for name in names]),
        ]
    )
    rest = peaks.new_tensor([*late, failed, -first])
    message = torch.cat([table.flatten(), rest])
    if size > 1:
        dist.all_reduce(message, dist.ReduceOp.MAX)
    table, rest = message[: table.numel()].view_as(table), message[table.numel() :]
    largest, is_nan, is_used, is_sparse = table.tolist()
    *is_late, any_failed, minus_first = rest.tolist()
    shown = [math.nan if nan else peak for nan, peak in zip(is_nan, largest, strict=True)]
    pairs = list(zip(names, shown, strict=True))
    return Report(
        overflow={name: peak for name, peak in pairs if not peak <= _fixed_point.LARGEST},
        large={name for name, peak in pairs if peak > _fixed_point.SMALL},
        used=set(compress(names, is_used)),
        sparse=set(compress(names, is_sparse)),
        late=[bool(flag) for flag in is_late],
        first=int(-minus_first),
        failed=bool(any_failed),
    )

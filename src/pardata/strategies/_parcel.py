"""Numbers that travel with the gradients of strategy "ddp"."""

from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pardata.strategies._ddp_reducer import reduces_late, register_hook

_SMALL = 2**17  # numbers: gradients that are copied in less time than a collective takes
_MOST_RANKS = 64  # by which what travels with them, some 100 numbers for each, is no longer small


class Parcel:
    """Numbers that travel with the gradients, at the end of the bucket that is reduced first.

    A collective of their own would take as long as that of a small model's gradients. A large
    model's take longer to copy than that, and PyTorch reduces them best without a hook.

    Gradients are added in float32, which is not enough for a time or a large count. So each rank's
    float64 numbers have places of their own, as whole numbers of 16 bits. The other ranks add zeros
    to them: that is exact, also for what is infinite or NaN.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.numbers: Tensor | None = None  # to be sent with the next bucket
        self.told: Any = None

    def sums(self) -> Tensor:
        """Return the sums of what all ranks have told, the same on all to the bit."""
        words: Tensor = self.told.to(torch.int16)
        return words.view(torch.float64).view(self.group.size(), -1).sum(0)


def _mean_with_parcel(parcel: Parcel, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket as DDP does, to the mean over the ranks; and the numbers of `parcel`."""
    gradients, size = bucket.buffer(), parcel.group.size()
    count, numbers = len(gradients), parcel.numbers
    if numbers is None:
        sent = gradients.div_(size)
    else:
        words = numbers.view(torch.int16)
        places = gradients.new_zeros(size, len(words))
        places[parcel.group.rank()] = words
        sent = torch.cat([gradients.div_(size), places.view(-1)])
        parcel.numbers, parcel.told = None, sent[count:]
    done = torch.futures.Future[Tensor]()
    if bucket.is_last() and sent.is_cpu:
        # Nothing is left to be computed meanwhile, and to wait here takes one thread less.
        dist.all_reduce(sent, group=parcel.group)
        done.set_result(sent[:count])
    else:
        work: Any = dist.all_reduce(sent, group=parcel.group, async_op=True)
        done = work.get_future().then(lambda future: future.value()[0][:count])
    return done


def parcel_for(model: DistributedDataParallel) -> Parcel | None:
    """Arrange what carries numbers with the gradients, if that can be. The same on all ranks.

    It cannot if the model is large, if the user has registered a hook, or if gradients have too
    few digits.
    """
    parameters = list(model.module.parameters())
    wide = {p.dtype for p in parameters} <= {torch.float32, torch.float64}
    sparse = any(getattr(part, "sparse", False) for part in model.module.modules())
    small = sum(p.numel() for p in parameters) <= _SMALL
    few = model.process_group.size() <= _MOST_RANKS
    one_device = len({p.device for p in parameters}) == 1
    if small and few and wide and one_device and not (sparse or reduces_late(model)):
        with suppress(RuntimeError):  # there can be one hook, and the user has his own
            parcel = Parcel(model.process_group)
            register_hook(model, parcel, _mean_with_parcel)
            return parcel
    return None

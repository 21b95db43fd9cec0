"""A loss of several terms, each of which is a mean over another count."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pardata.step._share import Microbatch, Share
from pardata.step._tally import checked


def with_one_loss(
    returned: Any, microbatch: Microbatch, share: Share, outputs: list[Tensor]
) -> Any:
    """Return what `loss_fn` returned, where `count` returns a dict with the sum of its terms.

    Each term has the weight of its own count. The caller multiplies every loss by the
    microbatch's part of the step, so the sum is divided by that.

    Args:
        returned: by `loss_fn`.
        microbatch: for which.
        share: with the counts of the step.
        outputs: the tensors that the model has returned. The list is emptied, so that they do not
            live through the backward.
    """
    kept = outputs.copy()
    outputs.clear()
    totals = {name: total for name, total in share.totals().items() if name}
    if not totals:
        return returned
    has_metrics = type(returned) is tuple and len(returned) == 2
    terms = returned[0] if has_metrics else returned
    if not isinstance(terms, Mapping) or terms.keys() != totals.keys():
        shown = [*terms] if isinstance(terms, Mapping) else type(terms).__name__
        raise TypeError(
            f"`loss_fn` must return a dict of losses for the names that `count` returns, "
            f"{[*totals]}, but returned {shown}: return the mean of each term under its name"
        )
    losses = {name: checked(terms[name]) for name in totals}
    if microbatch.count:
        part, own = microbatch.count / share.expected(), microbatch.counts
        # 0 times NaN is NaN: a term that counts nothing is left out. In its place stand zeros of
        # what the model returns: DDP waits for the gradients of all that is trained.
        counted = [losses[name] * (own[name] / totals[name] / part) for name in totals if own[name]]
        seen = kept if len(counted) < len(totals) else []
        zeros = [(out.nan_to_num(0, 0, 0) * 0).sum() for out in seen if out.requires_grad]
        loss: Any = sum([*counted, *zeros])
    else:  # its backward adds zeros alone
        loss = sum(losses.values())
    return (loss, returned[1]) if has_metrics else loss

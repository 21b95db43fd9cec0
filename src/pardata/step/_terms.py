"""A loss of several terms, each of which is a mean over another count."""

from collections.abc import Mapping
from typing import Any

from pardata.step._count import Microbatch, Share
from pardata.step._tally import checked


def with_one_loss(returned: Any, microbatch: Microbatch, share: Share) -> Any:
    """Return what `loss_fn` returned, where `count` returns a dict with the sum of its terms.

    Each term has the weight of its own count. The caller multiplies every loss by the
    microbatch's part of the step, so the sum is divided by that.
    """
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
    part = microbatch.count / share.expected() if microbatch.count else 1
    loss: Any = 0
    for name, total in totals.items():
        term, count = checked(terms[name]), microbatch.counts.get(name, 0)
        # 0 times NaN is NaN. A term that counts nothing stays in the graph: DDP waits for it.
        loss += term * (count / total / part) if count else term.nan_to_num(0, 0, 0) * 0
    return (loss, returned[1]) if has_metrics else loss

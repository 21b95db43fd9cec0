"""A metric that is a mean over another count than the loss."""

from dataclasses import dataclass

from torch import Tensor

from pardata.collectives._fingerprint import number_of


@dataclass(frozen=True)
class Mean:
    """A metric with a denominator: ``Mean(total, count)``, for `backward`.

    `backward` returns the sum of the totals over the sum of the counts, of all microbatches and
    ranks. It is NaN where nothing counts. The accuracy of a class is
    ``Mean((hits & is_class).sum(), is_class.sum())``. Microbatches that count 0 for the loss are
    left out. In type annotations metrics that hold one are ``Any``.

    Args:
        total: a number, or a tensor of any shape.
        count: what the total is a sum over: one number, or a tensor of the shape of `total`.

    Raises:
        TypeError: one of the two is no number and no dense tensor of real numbers.
        ValueError: the count has another shape.

    >>> import torch
    >>> from pardata import backward
    >>> net, x = torch.nn.Linear(1, 1), torch.tensor([[1.0], [2.0], [-1.0]])
    >>> def loss_fn(model, x):
    ...     return model(x).square().mean(), Mean(x[x > 0].sum(), (x > 0).sum())
    >>> backward(net, loss_fn, x)[1]
    tensor(1.5000)
    """

    total: Tensor | float
    count: Tensor | float

    def __post_init__(self) -> None:
        number_of(self.total, (), "total")
        number_of(self.count, (), "count")
        of_total, of_count = (tuple(getattr(n, "shape", ())) for n in (self.total, self.count))
        if of_count not in ((), of_total):
            raise ValueError(
                f"`count` must be one number, or have the shape of `total`, {of_total}, but has "
                f"the shape {of_count}: return a mean for each count"
            )

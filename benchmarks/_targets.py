"""The targets of the benchmarks, in one place: the scripts and the pages with figures read them."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """At most `limit`, or at least `limit`."""

    limit: float
    at_least: bool = False

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"

    def verdict(self, value: float, noise: float) -> str:
        """Return whether `value` meets the target, and whether chance may have decided it."""
        if math.isnan(value):
            return "not measured"
        met = value >= self.limit if self.at_least else value <= self.limit
        text = "met" if met else "missed"
        return f"{text}, within the noise" if abs(value - self.limit) <= noise else text


TARGETS: dict[str, Target] = {
    # Ratios of seconds a step: less is better.
    "step of wrap_model": Target(1.02),
    "README's loop, MLP, 1 process": Target(1.15),
    "README's loop, MNIST net, 1 process": Target(1.01),
    "README's loop, MLP, 2 processes": Target(1.05),
    "README's loop, MNIST net, 2 processes": Target(1.01),
    "exact, microbatches of 64": Target(1.02),
    "exact, microbatches of 4": Target(1.05),
    "exact, bytes a parameter": Target(12),
    "cost, ddp": Target(1.1),
    "metrics, one call": Target(1.5),
    "metrics, a call each": Target(4, at_least=True),
    # Ratios of samples a second: more is better.
    "cached, mnist": Target(100, at_least=True),
    "cached, affine": Target(15, at_least=True),
    "cached, cifar": Target(25, at_least=True),
    "of the limit, mnist": Target(0.6, at_least=True),
    "of the limit, affine": Target(0.9, at_least=True),
    "of the limit, cifar": Target(0.95, at_least=True),
    "one by one, mnist": Target(0.85, at_least=True),
    "one by one, affine": Target(0.85, at_least=True),
    "one by one, cifar": Target(0.97, at_least=True),
    # Ratios of seconds: less is better.
    "epoch, 1 process": Target(0.55),
    "epoch, 2 processes": Target(0.65),
    "epoch, of the limit": Target(1.05),
    "checkpoint, over the copy": Target(1.2),
    "checkpoint, over dcp.async_save": Target(1),
    # Values.
    "import, ms": Target(30),
    "first batch, ms": Target(100),
    "first batch, MB": Target(50),
    "a sample, us": Target(2),
    "barrier, s": Target(1),
    "wrap_model, s": Target(2),
    "growth with the ranks, exponent": Target(1),
    # On a GPU.
    "ten epochs of LeNet, s": Target(3),
    "share of the time waiting": Target(0.03),
    "of all batches on the GPU": Target(0.97, at_least=True),
    "README's loop, one GPU": Target(1.02),
    "exact, one GPU": Target(1.5),
}

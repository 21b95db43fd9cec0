"""What the tests of collectives share: nested values, taken apart and put together."""

from typing import NamedTuple

from pardata.collective._numbers import numbers_of
from pardata.collective._tree import rebuilt


class Metrics(NamedTuple):
    loss: object
    correct: object


def leaves(value):
    return list(numbers_of(value).values())


def rebuild(value, replacements):
    return rebuilt(value, dict(zip(numbers_of(value), replacements, strict=True)))

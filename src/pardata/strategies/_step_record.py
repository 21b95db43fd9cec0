"""The record of a model: what its successful steps have found out, and later steps need not check.

Does not belong to the model's state, and is neither copied nor pickled with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


@dataclass(frozen=True)
class StepRecord:
    """What the steps of a model have found out. Ranks agree on it, because they succeed together.

    Attributes:
        is_checked: whether hooks, and the leaves of the loss, were checked.
        is_single: whether a step in a single process has passed all checks.
        loss_communicates: whether `loss_fn` calls torch.distributed.
        usual_count: the global count of the first step, of a batch that no loader made.
        structures: the last structures of metrics.
    """

    is_checked: bool = False
    is_single: bool = False
    loss_communicates: bool = False
    usual_count: float | None = None
    structures: tuple[str, ...] = ()


_NEW = StepRecord()
_records: WeakKeyDictionary[nn.Module, StepRecord] = WeakKeyDictionary()


def record_of(layer: object) -> StepRecord:
    """Return the record of the model with this layer, which belongs to its strategy."""
    return _records.get(layer, _NEW) if isinstance(layer, nn.Module) else _NEW


def update_record(layer: nn.Module, found: Mapping[str, Any]) -> None:
    """Change attributes of the record, after a step has succeeded."""
    record = record_of(layer)
    if any(getattr(record, name) != value for name, value in found.items()):
        _records[layer] = replace(record, **found)

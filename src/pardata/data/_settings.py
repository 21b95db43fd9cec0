"""What the user wants of a loader, and what follows from it on this rank."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Literal, TypedDict

import torch
from torch.utils.data import Dataset, Sampler

from pardata.data._plan import Plan
from pardata.environment._world import World


class WorkerOptions(TypedDict):
    """What a ``DataLoader`` is told of workers, and of what they bring; by its own names."""

    num_workers: int
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: BaseContext | str | None
    prefetch_factor: int | None
    persistent_workers: bool


@dataclass(frozen=True)
class Arguments:
    """What the user wrote: the parameters of `make_loader`."""

    dataset: Dataset[object]
    batch_size: int | None
    distributed: bool | Literal["auto"]
    shuffle: bool
    drop_last: bool | None
    microbatch_size: int | None
    sampler: Sampler[object] | None
    batch_sampler: Iterable[Sequence[object]] | None
    sharded: bool
    num_workers: int | Literal["auto"]
    seed: int | None
    reproducible: bool
    device: torch.device | str | None
    batch_transform: Callable[[object], object] | None
    prefetch: int
    collate_fn: Callable[[list[object]], object] | None
    pin_memory: bool | None
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: BaseContext | str | None
    prefetch_factor: int | None
    persistent_workers: bool | None

    @property
    def trains(self) -> bool:
        """Whether the order says that this may be training."""
        return bool(self.shuffle) or self.sampler is not None


@dataclass(frozen=True)
class Settings:
    """What follows from the arguments on this rank. Nothing is left open.

    Attributes:
        here: this process, also if nothing is shared out.
        ranks: those that share each global batch: this one alone if nothing is shared out.
        pins: whether the batches are pinned here, and not by ``DataLoader``.
        numbered: PyTorch's initial seed and the loader's number, of which a default seed is made.
    """

    given: Arguments
    here: World
    ranks: World
    plan: Plan
    device: torch.device
    workers: WorkerOptions
    pins: bool
    seed: int
    numbered: tuple[int, int] | None = None

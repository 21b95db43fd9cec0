"""Copies batches to the device and transforms them there, ahead of the loop on a side stream.

Does not prefetch on devices without streams, as the CPU.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pardata._pytree import KeyPath, map_with_path
from pardata.data._batch import is_opaque
from pardata.data._fetcher import Collator
from pardata.data._plan import FetchedStep, StepInfo
from pardata.environment._device import has_streams

Shaped: TypeAlias = Callable[[FetchedStep], Any]


class DeviceTransfer(NamedTuple):
    """The device of batches, and the transform that runs there.

    Attributes:
        pins: whether to pin batches before the copy. ``DataLoader`` pins the batches of workers.
    """

    device: torch.device
    transform: Callable[[Any], Any] | None
    collation: Collator
    prefetch: int
    pins: bool = False

    def transferred(self, fetched: FetchedStep) -> list[Any]:
        """Return the batches of a step, copied to the device and transformed."""
        step = fetched.step
        numbered = enumerate(fetched.batches, step.first)
        return [self._transferred(batch, step, number) for number, batch in numbered]

    def _transferred(self, batch: Any, step: StepInfo, microbatch: int) -> Any:
        batch = to_device(pin_batch(batch) if self.pins else batch, self.device)
        if self.transform is None:
            return batch
        with self.collation.context_for("batch_transform", step, microbatch, self.device):
            return self.collation.call("batch_transform", self.transform, batch, step)

    def prefetched(self, fetched: Iterator[FetchedStep], shaped: Shaped) -> Iterator[Any]:
        """Yield ``shaped(step)`` for each step, on a GPU ahead of the loop."""
        if not (has_streams(self.device) and self.prefetch):
            # In `map`, a StopIteration of a user's `to` or `pin_memory` would end the epoch.
            return (shaped(each) for each in fetched)
        return _prefetch(fetched, shaped, self.device, self.prefetch)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`; the copy of pinned tensors is asynchronous.

    Other objects are moved by their method ``to``, if they have one.
    """

    def move(_: KeyPath, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            # Without streams, an asynchronous copy may read freed memory.
            return leaf.to(device, non_blocking=has_streams(device))
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    return batch if device.type == "cpu" else map_with_path(batch, move, is_leaf=is_opaque)


def pin_batch(batch: Any) -> Any:
    """Return `batch` with its CPU tensors in pinned memory.

    Other objects are pinned by their method ``pin_memory``, if they have one.
    """

    def pin(_: KeyPath, leaf: Any) -> Any:
        stays = isinstance(leaf, Tensor) and leaf.device.type != "cpu"
        return leaf if stays or not hasattr(leaf, "pin_memory") else leaf.pin_memory()

    return map_with_path(batch, pin, is_leaf=is_opaque)


def _prefetch(
    fetched: Iterator[FetchedStep], shaped: Shaped, device: torch.device, count: int
) -> Iterator[Any]:
    """Yield ``shaped(step)``, which runs on a side stream, up to `count` steps ahead of the loop.

    Fetching runs on the stream of the loop, whose step may write tensors that a dataset reads.
    """
    stream, of_kind = _side_stream(device), torch.get_device_module(device)
    ready: deque[tuple[Any, torch.Event, FetchedStep]] = deque()
    failed: Exception | None = None

    def draw(most: int) -> None:
        nonlocal failed
        try:
            for each in islice(fetched, most):
                # The side stream waits for two things: the fetched tensors may still be computed,
                # and memory that the loop has freed may still be read by its kernels.
                stream.wait_stream(of_kind.current_stream(device))
                with of_kind.stream(stream):
                    ready.append((shaped(each), stream.record_event(), each))
        except Exception as error:  # noqa: BLE001  # raised at its step, after the steps before it
            failed = error

    draw(1)
    while ready:
        batch, placed, source = ready.popleft()
        current = of_kind.current_stream(device)
        draw(0 if failed else count - len(ready))
        current.wait_event(placed)
        del source  # the allocator may reuse the source: the current stream waits for the copy
        yield batch
    if failed is not None:
        raise failed


@cache
def _side_stream(device: torch.device) -> Any:
    """Return the side stream of a GPU, one for all loaders: the allocator caches by stream."""
    return torch.get_device_module(device).Stream(device)

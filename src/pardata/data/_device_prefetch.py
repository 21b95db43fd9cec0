"""Batches on their device: moved, transformed there, and ahead of the step that needs them."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pardata._pytree import KeyPath, map_with_path
from pardata.data._batch_utils import is_opaque
from pardata.data._fetcher import Collator
from pardata.data._plan import FetchedStep, StepInfo
from pardata.environment._device import has_streams

Shaped: TypeAlias = Callable[[FetchedStep], Any]


class DeviceTransfer(NamedTuple):
    """Where batches go, and what is done to them there.

    Attributes:
        pins: whether to pin them here, for the copy. In batches of workers DataLoader does it.
    """

    device: torch.device
    transform: Callable[[Any], Any] | None
    collation: Collator
    prefetch: int
    pins: bool = False

    def transferred(self, fetched: FetchedStep) -> list[Any]:
        """Return the batches of a step on the device and transformed, one by one."""
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
        """Yield what `shaped`, which places it, makes of each step; on a GPU ahead of the loop."""
        if not (has_streams(self.device) and self.prefetch):
            # Not `map`: a StopIteration of a user's `to` or `pin_memory` is an error here.
            return (shaped(each) for each in fetched)
        return _prefetch(fetched, shaped, self.device, self.prefetch)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`; for a GPU asynchronously, where they are pinned.

    An object of another kind is moved by its own ``to``, if it has one.
    """

    def move(_: KeyPath, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            # Without streams a copy that nobody waits for may read what is no longer there.
            return leaf.to(device, non_blocking=has_streams(device))
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    return batch if device.type == "cpu" else map_with_path(batch, move, is_leaf=is_opaque)


def pin_batch(batch: Any) -> Any:
    """Return `batch` with its tensors in pinned memory, but for those that are on a GPU already.

    An object of another kind is pinned by its own ``pin_memory``, if it has one.
    """

    def pin(_: KeyPath, leaf: Any) -> Any:
        stays = isinstance(leaf, Tensor) and leaf.device.type != "cpu"
        return leaf if stays or not hasattr(leaf, "pin_memory") else leaf.pin_memory()

    return map_with_path(batch, pin, is_leaf=is_opaque)


def _prefetch(
    fetched: Iterator[FetchedStep], shaped: Shaped, device: torch.device, count: int
) -> Iterator[Any]:
    """Shape what is fetched on a stream of its own, `count` steps before they are asked for.

    It is fetched on the stream of the loop, whose step may write what a dataset reads.
    """
    stream, of_kind = _side_stream(device), torch.get_device_module(device)
    ready: deque[tuple[Any, torch.Event, FetchedStep]] = deque()
    failed: Exception | None = None

    def draw(most: int) -> None:
        nonlocal failed
        try:
            for each in islice(fetched, most):
                # What is fetched may still be in the making. And what the loop has read and dropped
                # is free again for this stream: it must not be written before it has been read.
                stream.wait_stream(of_kind.current_stream(device))
                with of_kind.stream(stream):
                    ready.append((shaped(each), stream.record_event(), each))
        except Exception as error:  # noqa: BLE001  # raised at its step, after those before it
            failed = error

    draw(1)
    while ready:
        batch, placed, source = ready.popleft()
        current = of_kind.current_stream(device)
        draw(0 if failed else count - len(ready))
        current.wait_event(placed)
        del source  # whose memory, of this stream, may serve for something else from now on
        yield batch
    if failed is not None:
        raise failed


@cache
def _side_stream(device: torch.device) -> Any:
    """Return the stream of a GPU for what runs ahead: the allocator keeps free memory by stream."""
    return torch.get_device_module(device).Stream(device)

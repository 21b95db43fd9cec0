"""Batches on their device: moved, transformed there, and ahead of the step that needs them."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch

from pardata.data._batch import moved, pinned, tensors_of
from pardata.data._plan import Step
from pardata.data._reader import Fetched, Seeds


class Placement(NamedTuple):
    """Where batches go, and what is done to them there.

    Attributes:
        pins: whether to pin them here, for the copy. In batches of workers DataLoader does it.
    """

    device: torch.device
    transform: Callable[[Any], Any] | None
    seeds: Seeds
    prefetch: int
    pins: bool = False

    def placed(self, fetched: Fetched) -> list[Any]:
        """Return the batches of a step on the device and transformed, one by one."""
        step = fetched.step
        return [self._placed(batch, step, n) for n, batch in enumerate(fetched.batches, step.first)]

    def _placed(self, batch: Any, step: Step, microbatch: int) -> Any:
        if self.pins:
            batch = pinned(batch)
        batch = moved(batch, self.device)
        if self.transform is None:
            return batch
        with self.seeds.around("batch_transform", step, microbatch, self.device):
            return self.transform(batch)

    def ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Let `batches`, which places as it is drawn, run ahead of the loop on a GPU."""
        if self.device.type != "cuda" or not self.prefetch:
            return batches
        return _ahead(batches, self.device, self.prefetch)


def _ahead(batches: Iterator[Any], device: torch.device, count: int) -> Iterator[Any]:
    """Draw `batches` on a stream of their own, `count` before they are asked for."""
    stream = _side_stream(device)
    # What the transform uses may still be in the making on the stream of now.
    stream.wait_stream(torch.cuda.current_stream(device))
    ready: deque[tuple[Any, torch.cuda.Event]] = deque()
    all_kept = True
    failed: Exception | None = None

    def draw(most: int) -> None:
        nonlocal failed
        try:
            with torch.cuda.stream(stream):
                ready.extend((batch, stream.record_event()) for batch in islice(batches, most))
        except Exception as error:  # noqa: BLE001  # raised at its step, after those before it
            failed = error

    draw(1)
    while ready:
        batch, placed = ready.popleft()
        current = torch.cuda.current_stream(device)
        if not all_kept:
            stream.wait_stream(current)
        draw(0 if failed else count - len(ready))
        current.wait_event(placed)
        all_kept = _kept(batch, current) and all_kept
        yield batch
    if failed is not None:
        raise failed


def _kept(batch: Any, user: torch.cuda.Stream) -> bool:
    """Tell the allocator that the stream `user` reads `batch`, which was made on another stream.

    Else its memory serves for the next ones while work that reads it is in the queue. Returns
    whether that could be told of all of it.
    """
    tensors = list(tensors_of(batch))
    dense = [x for x in tensors if x.layout == torch.strided and not x.is_nested]
    for tensor in dense:
        if tensor.is_cuda:
            tensor.record_stream(user)
    return len(dense) == len(tensors) > 0


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a GPU for what runs ahead: the allocator keeps free memory by stream."""
    return torch.cuda.Stream(device)

"""What benchmarks/gpu.py times: nets, the loops that train them, batches, and how to count."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile
from torch.utils.data import TensorDataset
from training_loop import mean_loss, sgd

from pardata import backward, make_loader, world, wrap_model

Block = Callable[[Iterable[Any]], None]


class Transformer(nn.Module):
    """Twelve layers, and the mean over a sequence."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 12)
        self.last = nn.Linear(width, 10)

    def forward(self, sequences: Tensor) -> Any:
        """Return the scores of each sequence."""
        return self.last(self.layers(sequences).mean(dim=1))


def lenet() -> nn.Module:
    """Return LeNet-5, with ReLU and max pooling."""
    first, second = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
    body = [first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(
        *body, nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
    )


def mlp() -> nn.Module:
    """Return a net whose step is mostly overhead."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def by_hand(net: nn.Module, loss_fn: Callable[..., Tensor] = mean_loss) -> Block:
    """Return the loop that people write."""
    device = world().device
    ids = None if device.type == "cpu" else [device]
    model = DistributedDataParallel(net.to(device), device_ids=ids)
    optimizer = sgd(model)

    def block(batches: Iterable[Any]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()

    return block


def readme(
    net: nn.Module, loss_fn: Callable[..., Tensor] = mean_loss, strategy: Any = "ddp"
) -> Block:
    """Return the loop of the README."""
    model = wrap_model(net, strategy)
    optimizer = sgd(model)

    def block(batches: Iterable[Any]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            backward(model, loss_fn, batch)
            optimizer.step()

    return block


def synchronise() -> None:
    """Wait for the GPU."""
    if world().device.type != "cpu":
        torch.accelerator.synchronize()


def timed(work: Callable[[], object]) -> float:
    """Return how many seconds something takes, to the end of it on the GPU."""
    synchronise()
    start = time.perf_counter()
    work()
    synchronise()
    return time.perf_counter() - start


def moved(loader: Iterable[Any]) -> Iterator[list[Tensor]]:
    """Yield the batches on the device, as people move them."""
    for batch in loader:
        yield [tensor.to(world().device, non_blocking=True) for tensor in batch]


def bf16_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss, computed in bfloat16 on images that are channels-last."""
    images, labels = batch
    with torch.autocast(world().device.type, dtype=torch.bfloat16):
        return cross_entropy(model(images.to(memory_format=torch.channels_last)), labels)


def ready(shape: tuple[int, ...], batch: int, steps: int, microbatch: int | None) -> list[Any]:
    """Return batches of noise, on the device."""
    data = TensorDataset(torch.randn(batch * steps, *shape), torch.arange(batch * steps) % 10)
    return list(make_loader(data, batch, microbatch_size=microbatch, seed=0))


def counted(block: Block, batches: list[Any]) -> tuple[float, float]:
    """Return how many kernels a step launches, and how often it waits for the GPU."""
    block(batches)
    synchronise()
    with profile(activities=torch.profiler.supported_activities()) as seen:
        block(batches)
    calls = {event.key: event.count / len(batches) for event in seen.key_averages()}
    launches = sum(count for name, count in calls.items() if "LaunchKernel" in name)
    # The profiler itself waits for the whole device at its end. So CUDA and ROCm call it: of others
    # nothing is known.
    ends = ("StreamSynchronize", "EventSynchronize")
    waits = sum(count for name, count in calls.items() if name.endswith(ends))
    return (launches, waits) if launches else (math.nan, math.nan)

"""What the benchmarks of GPUs time: nets, the loops that train them, and batches."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from _nets import SMALL_NETS, Block, mean_loss, trained_by
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from torchvision.models.resnet import BasicBlock, ResNet

from pardata import backward, make_loader, world, wrap_model


class Transformer(nn.Module):
    """Some layers, and the mean over a sequence."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth)
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


def nets(*, is_full: bool) -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]]:
    """Return, by name, how a net is made, the shape of a sample, and of how many a batch is."""
    width, tokens, batch, pixels = (512, 128, 256, 32) if is_full else (16, 4, 8, 16)
    depth, blocks = (12, 2) if is_full else (1, 1)  # a dry run has ResNet-10
    return {
        "small MLP": (lambda: nn.Sequential(*SMALL_NETS["mlp"][1]()), (64,), 32),
        "ResNet-18": (partial(ResNet, BasicBlock, [blocks] * 4, 10), (3, pixels, pixels), batch),
        "transformer": (partial(Transformer, width, depth), (tokens, width), max(4, batch // 8)),
    }


def by_hand(net: nn.Module, loss_fn: Callable[..., Tensor] = mean_loss) -> Block:
    """Return the loop that people write."""
    device = world().device
    ids = None if device.type == "cpu" else [device]
    model = DistributedDataParallel(net.to(device), device_ids=ids)
    return trained_by(model, lambda trained, batch: loss_fn(trained, batch).backward())


def readme(
    net: nn.Module, loss_fn: Callable[..., Tensor] = mean_loss, strategy: Any = "ddp"
) -> Block:
    """Return the loop of the README."""
    model = wrap_model(net, strategy)
    return trained_by(model, lambda trained, batch: backward(trained, loss_fn, batch))


def synchronize() -> None:
    """Wait for the GPU."""
    if world().device.type != "cpu":
        torch.accelerator.synchronize()


def timed(work: Callable[[], object]) -> float:
    """Return how many seconds something takes, to the end of it on the GPU."""
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
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

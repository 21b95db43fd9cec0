"""The images that the benchmarks read: one at a time with torchvision, or by whole batches."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from _measure import positive
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import datasets, transforms

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"
sys.path.insert(0, str(ROOT / "examples" / "articles"))

from batch_transforms import normalize, random_affine, random_crop, random_flip  # noqa: E402  # path first

AFFINE = {"degrees": 10, "translate": (0.1, 0.1), "scale": (0.9, 1.1)}


@dataclass(frozen=True)
class Images:
    """Some images, and what is done to them.

    Attributes:
        title: what they are.
        directory: where they are.
        read: makes the dataset, with a transform of single images or none.
        augment: such transforms, before ToTensor.
        mean: of each channel.
        std: of each channel.
        augment_batch: does to a whole batch what `augment` does; None where that is nothing.
    """

    title: str
    directory: Path
    read: Callable[[Callable[[Any], Any] | None], Dataset[Any]]
    augment: list[Callable[[Any], Any]]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment_batch: Callable[[Tensor], Tensor] | None

    def one_by_one(self) -> Dataset[Any]:
        """Return the dataset that decodes, augments and normalizes one image at a time."""
        return self._with(self.augment)

    def without_augmenting(self) -> Dataset[Any]:
        """Return the dataset that decodes and normalizes one image at a time."""
        return self._with([])

    def transform(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Augment and normalize a whole batch of what ``read(None)`` yields."""
        images, labels = batch
        if self.augment_batch is not None:
            images = self.augment_batch(images)
        return normalize(images, self.mean, self.std), labels

    def _with(self, augment: list[Callable[[Any], Any]]) -> Dataset[Any]:
        standard = transforms.Normalize(self.mean, self.std)
        return self.read(transforms.Compose([*augment, transforms.ToTensor(), standard]))


def mnist(data_dir: Path, samples: int | None = None) -> Images:
    """Return MNIST, or its first samples."""
    return Images(
        "MNIST",
        data_dir / "MNIST" / "raw",
        partial(_read_mnist, data_dir, samples),
        [],
        (0.1307,),
        (0.3081,),
        None,
    )


def mnist_affine(data_dir: Path, samples: int | None = None) -> Images:
    """Return MNIST, or its first samples, with a random affine."""
    return Images(
        "MNIST with a random affine",
        data_dir / "MNIST" / "raw",
        partial(_read_mnist, data_dir, samples),
        [transforms.RandomAffine(**AFFINE)],
        (0.1307,),
        (0.3081,),
        partial(random_affine, **AFFINE),
    )


def cifar(cifar_dir: Path, samples: int | None = None) -> Images:
    """Return CIFAR-10 as JPEG files, or some of each class, with random crop and flip."""
    return Images(
        "CIFAR-10 as JPEG, with random crop and flip",
        cifar_dir / "train",
        partial(_read_folder, cifar_dir / "train", samples),
        [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()],
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        _crop_and_flip,
    )


def add_data_dir(parser: argparse.ArgumentParser) -> None:
    """Let the command line say where MNIST is."""
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=SHARED if SHARED.is_dir() else Path("data"),
        help="where MNIST/raw is, as torchvision has it (default: %(default)s)",
    )


def add_cifar_dir(parser: argparse.ArgumentParser) -> None:
    """Let the command line say where CIFAR-10's files are."""
    parser.add_argument(
        "--cifar-dir",
        type=Path,
        default=Path(tempfile.gettempdir(), "cifar"),
        help="where train/<class>/*.jpg are (default: %(default)s)",
    )


def add_samples(parser: argparse.ArgumentParser, default: int | None = None) -> None:
    """Let the command line say how many samples a dataset has."""
    parser.add_argument(
        "--samples",
        type=positive,
        default=default,
        help=f"of a dataset at most (default: {default or 'all'})",
    )


def _read_mnist(
    data_dir: Path, samples: int | None, transform: Callable[[Any], Any] | None
) -> Dataset[Any]:
    found = datasets.MNIST(str(data_dir), transform=transform)
    found.data, found.targets = found.data[:samples], found.targets[:samples]
    return found


def _read_folder(
    directory: Path, samples: int | None, transform: Callable[[Any], Any] | None
) -> Dataset[Any]:
    found = datasets.ImageFolder(str(directory), transform=transform)
    if samples is not None:
        found.samples = found.samples[:: max(1, len(found.samples) // samples)][:samples]
    return found


def _crop_and_flip(images: Tensor) -> Tensor:
    return random_flip(random_crop(images, padding=4))

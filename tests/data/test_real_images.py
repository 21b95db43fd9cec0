"""Real images, where they lie beside the checkout: each once, and alike from a cache."""

import tarfile

import pytest
import torch
from alike import equal
from on_ranks import run
from places import SHARED_DATA

from pardata import all_gather, all_reduce_sum, cache_dataset, make_loader

datasets = pytest.importorskip("torchvision.datasets")
transforms = pytest.importorskip("torchvision.transforms")

CIFAR = SHARED_DATA / "cifar10-jpeg.tar.gz"
needs_mnist = pytest.mark.skipif(
    not (SHARED_DATA / "MNIST").exists(), reason="needs the files of MNIST beside the checkout"
)
needs_cifar = pytest.mark.skipif(
    not CIFAR.exists(), reason="needs cifar10-jpeg.tar.gz beside the checkout"
)


def images():
    return datasets.MNIST(SHARED_DATA, train=False, transform=transforms.PILToTensor())


def counted(folder):
    """Return how many images of each digit an evaluation sees, and a sum of their pixels."""
    cached = cache_dataset(images(), folder, num_workers=0)
    found = []
    for data in (images(), cached):
        digits, pixels = torch.zeros(10, dtype=torch.int64), 0
        for batch, labels in make_loader(data, 300, num_workers=0):
            digits += labels.bincount(minlength=10)
            weights = torch.arange(1, batch[0].numel() + 1).view(batch.shape[1:])
            pixels += int((batch.long() * weights).sum())
        found.append((all_reduce_sum(digits).tolist(), sum(all_gather(pixels))))
    return found


@needs_mnist
@pytest.mark.parametrize("size", [1, 3])
def test_an_evaluation_counts_every_test_image_once_and_a_cache_changes_nothing(size, tmp_path):
    truth = images()
    weights = torch.arange(1, 785).view(28, 28)
    expected = truth.targets.bincount().tolist(), int((truth.data.long() * weights).sum())
    for plain, cached in run(counted, str(tmp_path), world_size=size):
        assert plain == cached == expected


@needs_cifar
@pytest.mark.soak
def test_every_training_image_of_cifar_is_the_same_from_a_cache_to_the_last_bit(tmp_path):
    with tarfile.open(CIFAR) as archive:
        archive.extractall(tmp_path, filter="data")
    source = datasets.ImageFolder(tmp_path / "train", transforms.PILToTensor())
    cached = cache_dataset(source, tmp_path / "cache")
    assert len(cached) == 50_000
    loaders = [make_loader(data, 500, num_workers=0, device=None) for data in (source, cached)]
    assert all(equal(plain, again) for plain, again in zip(*loaders, strict=True))

"""The real MNIST, where it lies beside the checkout: each image once, and alike from a cache."""

import pytest
import torch
from on_ranks import run
from places import SHARED_DATA

from pardata import all_gather, all_reduce_sum, cache_dataset, make_loader

datasets = pytest.importorskip("torchvision.datasets")
transforms = pytest.importorskip("torchvision.transforms")

pytestmark = pytest.mark.skipif(
    not (SHARED_DATA / "MNIST").exists(), reason="needs the files of MNIST beside the checkout"
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


@pytest.mark.parametrize("size", [1, 3])
def test_an_evaluation_counts_every_test_image_once_and_a_cache_changes_nothing(size, tmp_path):
    truth = images()
    weights = torch.arange(1, 785).view(28, 28)
    expected = truth.targets.bincount().tolist(), int((truth.data.long() * weights).sum())
    for plain, cached in run(counted, str(tmp_path), world_size=size):
        assert plain == cached == expected

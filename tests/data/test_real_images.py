"""Real images, where they lie beside the checkout: alike from a cache."""

import tarfile

import pytest
from alike import equal
from places import SHARED_DATA

from pardata import cache_dataset, make_loader

datasets = pytest.importorskip("torchvision.datasets")
transforms = pytest.importorskip("torchvision.transforms")

CIFAR = SHARED_DATA / "cifar10-jpeg.tar.gz"


@pytest.mark.skipif(not CIFAR.exists(), reason="needs cifar10-jpeg.tar.gz beside the checkout")
@pytest.mark.soak
def test_every_training_image_of_cifar_is_the_same_from_a_cache_to_the_last_bit(tmp_path):
    with tarfile.open(CIFAR) as archive:
        archive.extractall(tmp_path, filter="data")
    source = datasets.ImageFolder(tmp_path / "train", transforms.PILToTensor())
    cached = cache_dataset(source, tmp_path / "cache")
    assert len(cached) == 50_000
    loaders = [make_loader(data, 500, num_workers=0, device=None) for data in (source, cached)]
    assert all(equal(plain, again) for plain, again in zip(*loaders, strict=True))

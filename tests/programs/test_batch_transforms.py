"""articles/batch_transforms.py: the same as torchvision's transforms, for a whole batch at once."""

import sys

import pytest
import torch
from places import ARTICLES
from torchvision.transforms import Normalize, ToTensor
from torchvision.transforms import functional as vision

sys.path.insert(0, str(ARTICLES))

from batch_transforms import affine, crop, flip, normalize, random_affine, random_crop, random_flip

RANDOM = {
    "affine": lambda images: random_affine(images, 10, (0.1, 0.1), (0.9, 1.1)),
    "crop": lambda images: random_crop(images, 4),
    "flip": random_flip,
}
EACH = pytest.mark.parametrize("name", RANDOM)
DTYPES = pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])


def images_of(shape, dtype=torch.uint8):
    """Return images without a pixel that is 0, which is what comes in at the edges."""
    return torch.randint(1, 256, shape, dtype=torch.uint8).to(dtype)


def blobs(count, channels, height, width):
    """Return images that are bright in one place: what is moved wrongly is seen."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return (x + 3 * y).expand(count, channels, -1, -1).to(torch.uint8)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (2, 20, 33)])
def test_affine_is_torchvisions_of_tensors_for_the_same_parameters(shape, dtype):
    torch.manual_seed(0)
    images = images_of((40, *shape), dtype)
    degrees = torch.empty(40).uniform_(-180, 180)
    shifts = torch.randint(-9, 10, (40, 2)).float()
    scales = torch.empty(40).uniform_(0.5, 2)
    found = affine(images, degrees, shifts, scales)
    expected = torch.stack(
        [
            vision.affine(image, angle, shift, scale, 0.0, fill=0)
            for image, angle, shift, scale in zip(
                images, degrees.tolist(), shifts.tolist(), scales.tolist(), strict=True
            )
        ]
    )
    assert found.dtype == dtype
    assert found.shape == images.shape
    # A pixel that comes from exactly between two may be either.
    assert (found != expected).float().mean() < 1e-4


@DTYPES
def test_crop_is_torchvisions_at_each_of_the_places(dtype):
    images = images_of((81, 3, 10, 14), dtype)
    top, left = torch.cartesian_prod(torch.arange(9), torch.arange(9)).unbind(1)
    found = crop(images, top, left, padding=4)
    expected = [
        vision.crop(vision.pad(image, 4), *place, 10, 14)
        for image, *place in zip(images, top.tolist(), left.tolist(), strict=True)
    ]
    assert found.dtype == dtype
    assert torch.equal(found, torch.stack(expected))


@DTYPES
def test_flip_is_torchvisions_of_those_chosen(dtype):
    images = images_of((4, 3, 5, 6), dtype)
    chosen = torch.tensor([True, False, False, True])
    found = flip(images, chosen)
    assert found.dtype == dtype
    for number, image in enumerate(images):
        assert torch.equal(found[number], vision.hflip(image) if chosen[number] else image)


def test_normalise_is_to_tensor_and_normalize():
    images = images_of((6, 3, 8, 5))
    mean, std = (0.49, 0.48, 0.44), (0.24, 0.25, 0.26)
    to_tensor, standard = ToTensor(), Normalize(mean, std)
    expected = torch.stack([standard(to_tensor(vision.to_pil_image(image))) for image in images])
    torch.testing.assert_close(normalize(images, mean, std), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalise_takes_floats_from_0_to_1_and_changes_no_input(dtype):
    images = torch.rand(2, 1, 4, 4, dtype=dtype)
    before = images.clone()
    found = normalize(images, (0.1307,), (0.3081,))
    assert found.dtype == dtype
    torch.testing.assert_close(found, (before - 0.1307) / 0.3081)
    assert torch.equal(images, before)


@pytest.mark.parametrize("shape", [(5, 1, 28, 28), (3, 3, 32, 20), (2, 4, 7, 9), (0, 3, 8, 8)])
@EACH
@DTYPES
def test_random_transforms_keep_shape_dtype_and_input(name, shape, dtype):
    images = images_of(shape, dtype)
    before = images.clone()
    found = RANDOM[name](images)
    assert found.shape == images.shape
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert torch.equal(images, before)


@pytest.mark.parametrize(("name", "different"), [("affine", 45), ("crop", 30), ("flip", 2)])
def test_each_image_is_transformed_differently_with_its_channels_alike(name, different):
    torch.manual_seed(0)
    one, *others = RANDOM[name](blobs(50, 3, 28, 28)).unbind(1)
    assert len({image.numpy().tobytes() for image in one}) >= different
    assert all(torch.equal(one, other) for other in others)


@EACH
def test_the_default_generator_decides_and_not_the_layout_in_memory(name):
    images = blobs(50, 3, 28, 28)
    results = []
    turned = images.to(memory_format=torch.channels_last)
    for seed, given in ((1, images), (1, turned), (2, images)):
        torch.manual_seed(seed)
        results.append(RANDOM[name](given))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])

"""articles/batch_transforms.py: the same as torchvision's transforms, for a whole batch at once."""

import math
import sys

import pytest
import torch
from places import ARTICLES
from torchvision.transforms import Normalize, ToTensor
from torchvision.transforms import functional as vision

sys.path.insert(0, str(ARTICLES))

import batch_transforms
from batch_transforms import affine, crop, flip, normalise, random_affine, random_crop, random_flip

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


def test_affine_far_outside_is_black():
    images = images_of((2, 1, 8, 8))
    shifts = torch.tensor([[100.0, 0.0], [0.0, -1e12]])
    assert not affine(images, torch.zeros(2), shifts, torch.ones(2)).any()


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
    torch.testing.assert_close(normalise(images, mean, std), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalise_takes_floats_to_be_from_0_to_1_and_leaves_its_input_be(dtype):
    images = torch.rand(2, 1, 4, 4, dtype=dtype)
    before = images.clone()
    found = normalise(images, (0.1307,), (0.3081,))
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
def test_each_image_of_a_batch_is_transformed_in_its_own_way_and_its_channels_alike(
    name, different
):
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


def parameters(monkeypatch, name, call):
    """Return the parameters that a random transform draws."""
    drawn = []
    monkeypatch.setattr(batch_transforms, name, lambda _images, *rest: drawn.extend(rest))
    torch.manual_seed(0)
    call()
    return drawn


def chi_square(found, expected):
    """Return how far the counts of the values are from those expected."""
    values, counts = found.unique(return_counts=True)
    counted = dict(zip(values.tolist(), counts.tolist(), strict=True))
    assert counted.keys() <= expected.keys()
    total = len(found)
    return sum(
        (counted.get(value, 0) - share * total) ** 2 / (share * total)
        for value, share in expected.items()
    )


def rounded_uniform(farthest):
    """Return the chances of ``round(uniform(-farthest, farthest))``, torchvision's shift."""
    last = round(farthest)
    edge = (farthest - last + 0.5) / (2 * farthest)
    inner = dict.fromkeys(range(1 - last, last), 1 / (2 * farthest))
    return {**inner, -last: edge, last: edge}


def test_random_affine_draws_as_torchvision_does(monkeypatch):
    images = torch.zeros(40_000, 1, 20, 28, dtype=torch.uint8)
    degrees, shifts, scales = parameters(
        monkeypatch, "affine", lambda: random_affine(images, 10, (0.1, 0.2), (0.9, 1.2))
    )
    # Ten equal parts of each range: 9 degrees of freedom, of which chance exceeds 34 once in 10**4.
    tenths = dict.fromkeys(range(10), 0.1)
    assert chi_square(((degrees + 10) / 2).floor().int(), tenths) < 34
    assert chi_square(((scales - 0.9) / 0.03).floor().int().clamp(0, 9), tenths) < 34
    # 2.8 pixels of the width, 4 of the height.
    assert chi_square(shifts[:, 0].int(), rounded_uniform(0.1 * 28)) < 34
    assert chi_square(shifts[:, 1].int(), rounded_uniform(0.2 * 20)) < 34
    assert torch.equal(shifts, shifts.round())
    drawn = torch.stack([degrees, shifts[:, 0], shifts[:, 1], scales])
    assert (drawn.corrcoef() - torch.eye(4)).abs().max() < 4 / math.sqrt(40_000)


def test_random_affine_only_turns_unless_told(monkeypatch):
    degrees, shifts, scales = parameters(
        monkeypatch, "affine", lambda: random_affine(images_of((9, 1, 4, 4)), 30)
    )
    assert degrees.unique().numel() == 9
    assert not shifts.any()
    assert (scales == 1).all()


def test_random_crop_draws_each_place_equally_often(monkeypatch):
    images = torch.zeros(40_000, 1, 2, 2, dtype=torch.uint8)
    top, left, padding = parameters(monkeypatch, "crop", lambda: random_crop(images, 2))
    assert padding == 2
    places = dict.fromkeys(range(25), 1 / 25)
    assert chi_square(top * 5 + left, places) < 60  # 24 degrees of freedom


@pytest.mark.parametrize("probability", [0.0, 0.25, 0.5, 1.0])
def test_random_flip_flips_that_share(monkeypatch, probability):
    images = torch.zeros(40_000, 1, 1, 2, dtype=torch.uint8)
    (chosen,) = parameters(monkeypatch, "flip", lambda: random_flip(images, probability))
    assert chosen.float().mean().item() == pytest.approx(probability, abs=0.01)
    if probability in (0, 1):
        assert chosen.unique().tolist() == [bool(probability)]

"""Normalizing and augmenting a whole batch at once: for the ``batch_transform`` of make_loader.

Images are uint8 or floats, of shape (n, channels, height, width), on any device. Each image of a
batch gets random parameters of its own, of the same distribution as with the torchvision transform
of that name, drawn from the default generator of the device, and without a loop over images: some
ten to a hundred times as fast.

    def augment(batch):
        images, labels = batch
        images = random_flip(random_crop(images, padding=4))
        return normalize(images, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)), labels

    make_loader(cached, 256, microbatch_size=256, shuffle=True, batch_transform=augment)

Each random function draws and then calls the one that does the work: `affine`, `crop`, `flip`.
Augment before normalizing, as with torchvision: what comes in at the edges is 0.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return what ``ToTensor`` and ``Normalize`` make of images: floats, less `mean`, over `std`.

    Both are one number a channel, for values from 0 to 1, to which uint8 is brought first.
    """
    if images.is_floating_point():
        images, largest = images.clone(), 1
    else:
        images, largest = images.float(), 255
    factors = [1 / (largest * deviation) for deviation in std]
    shifts = [middle / deviation for middle, deviation in zip(mean, std, strict=True)]
    return images.mul_(_for_each_channel(factors, images)).sub_(_for_each_channel(shifts, images))


def random_affine(
    images: Tensor,
    degrees: float,
    translate: tuple[float, float] = (0.0, 0.0),
    scale: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Turn, scale and shift each image at random, as ``RandomAffine`` with nearest neighbors.

    Args:
        images: the batch.
        degrees: by which an image turns at most, either way.
        translate: by which part of the width and of the height it moves at most, either way; it
            moves by whole pixels.
        scale: the least and the greatest factor.
    """
    count, _, height, width = images.shape
    drawn = torch.rand(count, 4, device=images.device)
    farthest = torch.tensor([translate[0] * width, translate[1] * height], device=images.device)
    return affine(
        images,
        (2 * drawn[:, 0] - 1) * degrees,
        ((2 * drawn[:, 1:3] - 1) * farthest).round(),
        scale[0] + drawn[:, 3] * (scale[1] - scale[0]),
    )


def random_crop(images: Tensor, padding: int) -> Tensor:
    """Move each image at random within a black frame, as ``RandomCrop`` to the size it had.

    Args:
        images: the batch.
        padding: how many pixels the frame is wide.
    """
    top, left = torch.randint(2 * padding + 1, (2, len(images)), device=images.device)
    return crop(images, top, left, padding)


def random_flip(images: Tensor, probability: float = 0.5) -> Tensor:
    """Mirror each image, left to right, or not, as ``RandomHorizontalFlip``."""
    return flip(images, torch.rand(len(images), device=images.device) < probability)


def affine(images: Tensor, degrees: Tensor, shifts: Tensor, scales: Tensor) -> Tensor:
    """Turn image i clockwise by ``degrees[i]``, scale it and shift it by ``shifts[i]``.

    Args:
        images: the batch.
        degrees: of shape (n,).
        shifts: of shape (n, 2), to the right and down, in pixels.
        scales: of shape (n,); above 1 an image grows.
    """
    height, width = images.shape[2:]
    # Backwards, from a pixel of the result to where it comes from; from the middle of the image.
    angles = degrees * (math.pi / 180)
    cos, sin = angles.cos() / scales, angles.sin() / scales
    right, down = shifts[:, 0], shifts[:, 1]
    # What comes from outside is taken from a frame that is one pixel wide and 0: hence the 1s.
    columns = _grid(cos, sin, 1 + width / 2 - cos * right - sin * down, images)
    rows = _grid(-sin, cos, 1 + height / 2 + sin * right - cos * down, images)
    columns, rows = columns.clamp_(0, width + 1), rows.clamp_(0, height + 1)
    # 32 bits, as the 64 that gather wants take several times as long to compute with.
    return _picked(F.pad(images, (1, 1, 1, 1)), rows.int(), columns.int())


def crop(images: Tensor, top: Tensor, left: Tensor, padding: int) -> Tensor:
    """Frame the images, and cut from each its own size, image i from (``top[i]``, ``left[i]``) on.

    Args:
        images: the batch.
        top: of shape (n,), integers from 0 to twice the padding.
        left: likewise.
        padding: how many black pixels the frame is wide.
    """
    height, width = images.shape[2:]
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = left[:, None] + torch.arange(width, device=images.device)
    framed = F.pad(images, (padding, padding, padding, padding))
    return _picked(framed, rows[:, :, None], columns[:, None, :])


def flip(images: Tensor, chosen: Tensor) -> Tensor:
    """Mirror, left to right, each image i for which ``chosen[i]`` is true."""
    columns = torch.arange(images.shape[3], device=images.device)
    columns = torch.where(chosen[:, None], columns.flip(0), columns)
    return images.gather(3, columns[:, None, None, :].expand_as(images))


def _grid(by_column: Tensor, by_row: Tensor, start: Tensor, images: Tensor) -> Tensor:
    """Return ``by_column * x + by_row * y + start`` of each image at the middles of its pixels."""
    height, width = images.shape[2:]
    x = torch.arange(width, device=images.device) - (width - 1) / 2
    y = torch.arange(height, device=images.device) - (height - 1) / 2
    along_row = by_column[:, None] * x
    along_column = by_row[:, None] * y + start[:, None]
    return along_column[:, :, None] + along_row[:, None, :]


def _picked(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return ``images[i, :, rows[i], columns[i]]`` for each image i, whatever its channels."""
    count, channels, _, width = images.shape
    pixels = torch.add(columns, rows, alpha=width).long()
    index = pixels.flatten(1)[:, None, :].expand(count, channels, -1)
    return images.flatten(2).gather(2, index).unflatten(2, pixels.shape[1:])


def _for_each_channel(values: Sequence[float], images: Tensor) -> Tensor:
    return torch.tensor(values, dtype=images.dtype, device=images.device).view(-1, 1, 1)

"""The images of the examples: digits without a download, downloads that explain, whole shares."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import Dataset

from pardata import Microbatches, rank_zero_first, world

_D = TypeVar("_D")


class Digits(Dataset[Any]):
    """scikit-learn's 1,797 handwritten digits, 8 x 8 pixels, brought to another size."""

    def __init__(
        self, *, train: bool, size: int, mode: str, transform: Callable[[Any], Any] | None
    ) -> None:
        digits = load_digits()
        split = train_test_split(
            digits.images, digits.target, test_size=360, random_state=0, stratify=digits.target
        )
        images, labels = (split[0], split[2]) if train else (split[1], split[3])
        pixels = (images * (255 / 16)).astype("uint8")  # 0 to 16, as scikit-learn has them
        small = [Image.fromarray(image, mode="L") for image in pixels]
        self._images = [image.resize((size, size), Image.Resampling.BILINEAR) for image in small]
        self._images = [image.convert(mode) for image in self._images]
        self._labels = labels.tolist()
        self._transform = transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self._images[index]
        return image if self._transform is None else self._transform(image), self._labels[index]


def downloaded(make: Callable[[], _D]) -> _D:
    """Return ``make()``, which downloads: on the first rank of each node, while the others wait."""
    try:
        with rank_zero_first(local=True):
            return make()
    except (RuntimeError, OSError) as error:
        if world().is_local_main:
            reason = str(error).splitlines()[0].rstrip(":")
            print(
                f"the data could not be downloaded ({reason}): try --data digits, which need none"
            )
        raise SystemExit(1) from None


def microbatch_size(batch_size: int) -> int:
    """Return the size of the pieces that are augmented under one seed each.

    Sixteen a batch: the same at every world size up to that.
    """
    return max(1, batch_size // max(16, world().size))


def whole_share(batch: Any) -> Any:
    """Return what this rank has of a step as one batch, also where it comes in microbatches."""
    if not isinstance(batch, Microbatches):
        return batch
    return [torch.cat(column) for column in zip(*batch, strict=True)]

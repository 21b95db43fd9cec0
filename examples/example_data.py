"""The images of the examples: digits that need no download, and downloads that explain."""

from collections.abc import Callable
from typing import Any, TypeVar

from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import Dataset

from pardata import rank_zero_first, world

_D = TypeVar("_D")


class Digits(Dataset[Any]):
    """scikit-learn's 1,797 handwritten digits, 8 x 8 pixels, brought to another size."""

    def __init__(
        self, *, train: bool, size: int, mode: str, transform: Callable[[Any], Any]
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
        return self._transform(self._images[index]), self._labels[index]


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

"""The shards that shards.py reads: how they are written, opened by number, and read as streams."""

import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

PAGE = Path(__file__).parents[1] / "docs" / "howto-shards.md"
BATCH = 256
NEIGHBOURS = 1000  # among which a stream shuffles

Batch = tuple[list[bytes], Tensor]


@dataclass(frozen=True)
class Format:
    """One kind of shards, and one way to read them.

    Attributes:
        needs: the libraries.
        write: writes so many samples in so many shards to a folder.
        opened: returns what is in a folder, by number.
        collate: makes a batch of its samples.
        own: what the library's own loader is called, if it has one.
        stream: makes that, of a folder; one that has a state resumes from it.
    """

    needs: list[str]
    write: Callable[[Path, int, int], None]
    opened: Callable[[Path], Any]
    collate: Callable[[list[Any]], Batch]
    own: str = ""
    stream: Callable[[Path], Iterable[Batch]] | None = None

    def missing(self) -> list[str]:
        """Return the libraries that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]

    def by_data_loader(self, dataset: Any) -> Iterable[Batch]:
        """Return PyTorch's loader of what is read by number."""
        return DataLoader(dataset, BATCH, shuffle=True, drop_last=True, collate_fn=self.collate)


@cache
def noise() -> bytes:
    """Return what the samples are cut from."""
    return Random(0).randbytes(4000)  # noqa: S311  # no secret


def sample(number: int) -> tuple[bytes, int]:
    """Return a sample: bytes, as many as those of a small picture, and its number."""
    start = number % 997
    return noise()[start : start + 1000 + 37 * number % 2000], number


def in_shards(write: Callable[[Path, range], None]) -> Callable[[Path, int, int], None]:
    """Return what writes as many samples to each of several files."""

    def write_all(folder: Path, samples: int, shards: int) -> None:
        each = samples // shards
        for shard in range(shards):
            write(folder / f"{shard:04}", range(shard * each, (shard + 1) * each))

    return write_all


def in_folder(folder: Path, ending: str) -> list[str]:
    """Return the shards of a folder."""
    return [str(path) for path in sorted(folder.glob(f"*.{ending}"))]


@cache
def from_page(name: str) -> Any:
    """Return a class of the page, made by its first block and by that which has the class."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    found: dict[str, Any] = {"__name__": name}
    for code in (blocks[0], next(code for code in blocks if f"class {name}(" in code)):
        exec(code, found)  # noqa: S102  # what the page shows is what is measured
    return found[name]


# --- samples as dicts: in tar files, Parquet and Arrow


def of_dicts(samples: list[Any], prefix: str = "") -> Batch:
    """Return a batch of dicts, whose values may be files."""
    pictures, numbers = (
        [value.read() if hasattr(value, "read") else value for value in column]
        for column in zip(*((s[f"{prefix}jpg"], s[f"{prefix}cls"]) for s in samples), strict=True)
    )
    return pictures, torch.tensor([int(number) for number in numbers])


def write_tar(path: Path, numbers: range) -> None:
    """Write samples as WebDataset does."""
    with tarfile.open(path.with_suffix(".tar"), "w") as tar:
        for number in numbers:
            picture, _ = sample(number)
            for ending, content in {"cls": b"%d" % number, "jpg": picture}.items():
                file = tarfile.TarInfo(f"{number:09}.{ending}")
                file.size = len(content)
                tar.addfile(file, io.BytesIO(content))


def tars(folder: Path) -> Any:
    """Return the samples of tar files, whose index lies beside them."""
    return from_page("Tars")(in_folder(folder, "tar"), folder / "index.pt")


def by_webdataset(folder: Path) -> Iterable[Batch]:
    """Return the loader of WebDataset, which has no state."""
    import webdataset  # noqa: PLC0415  # optional

    shards = in_folder(folder, "tar")
    data = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=0).shuffle(NEIGHBOURS)
    return webdataset.WebLoader(data, batch_size=BATCH, drop_last=True, collate_fn=of_dicts)


def by_wids(folder: Path) -> Any:
    """Return the samples of tar files, found by wids, where they are."""
    from wids import ShardListDataset, wids  # noqa: PLC0415  # optional

    notes = folder / "shards.json"
    if not notes.exists():
        counts = {url: wids.compute_num_samples(url) for url in in_folder(folder, "tar")}
        notes.write_text(json.dumps([{"url": u, "nsamples": n} for u, n in counts.items()]))
    shards = json.loads(notes.read_text())
    return ShardListDataset(shards, transformations=[], lru_size=200, localname=str)


def table_of(numbers: range) -> Any:
    """Return samples as a table of Arrow."""
    import pyarrow as pa  # noqa: PLC0415  # optional

    pictures, classes = zip(*map(sample, numbers), strict=True)
    return pa.table({"jpg": pictures, "cls": classes})


def write_parquet(path: Path, numbers: range) -> None:
    """Write samples as Parquet."""
    from pyarrow import parquet  # noqa: PLC0415  # optional

    parquet.write_table(table_of(numbers), path.with_suffix(".parquet"))


def by_datasets(folder: Path) -> Any:
    """Return the rows of Parquet files, which are written as Arrow files at the first time."""
    import datasets  # noqa: PLC0415  # optional

    datasets.disable_progress_bars()
    where = {"split": "train", "cache_dir": str(folder / "cache")}
    return datasets.load_dataset("parquet", data_files=in_folder(folder, "parquet"), **where)


class Streamed:
    """The stream of datasets in PyTorch's loader, with its state."""

    def __init__(self, folder: Path) -> None:
        shards = len(in_folder(folder, "parquet"))
        stream = by_datasets(folder).to_iterable_dataset(num_shards=shards)
        self._stream = stream.shuffle(seed=0, buffer_size=NEIGHBOURS)
        self.state_dict = self._stream.state_dict
        self.load_state_dict = self._stream.load_state_dict

    def __iter__(self) -> Iterator[Batch]:
        return iter(DataLoader(self._stream, BATCH, drop_last=True, collate_fn=of_dicts))


def write_arrow(path: Path, numbers: range) -> None:
    """Write samples as an Arrow file."""
    import pyarrow as pa  # noqa: PLC0415  # optional

    table = table_of(numbers)
    with (
        pa.OSFile(str(path.with_suffix(".arrow")), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)


def arrows(folder: Path) -> Any:
    """Return the rows of Arrow files."""
    return from_page("Arrows")(in_folder(folder, "arrow"))


# --- samples as tuples: in chunks of LitData


def of_pairs(samples: list[tuple[bytes, int]]) -> Batch:
    """Return a batch of tuples."""
    pictures, numbers = zip(*samples, strict=True)
    return list(pictures), torch.tensor(numbers)


def write_chunks(folder: Path, samples: int, shards: int) -> None:
    """Write samples as LitData does."""
    from litdata.streaming import Cache  # noqa: PLC0415  # optional

    cache = Cache(str(folder), chunk_size=samples // shards)
    for number in range(samples):
        cache[number] = sample(number)
    cache.done()
    cache.merge(1)


def chunks(folder: Path) -> Any:
    """Return the items in chunks of LitData."""
    return from_page("Chunks")(folder)


def by_litdata(folder: Path) -> Iterable[Batch]:
    """Return the loader of LitData."""
    from litdata import StreamingDataLoader, StreamingDataset  # noqa: PLC0415  # optional

    data = StreamingDataset(str(folder), shuffle=True, drop_last=False)
    loader: Iterable[Batch] = StreamingDataLoader(
        data, batch_size=BATCH, num_workers=0, collate_fn=of_pairs
    )
    return loader


TAR = ["webdataset"], in_shards(write_tar)
PARQUET = ["datasets", "pyarrow"], in_shards(write_parquet)

FORMATS = {
    "tar": Format(*TAR, tars, of_dicts, "webdataset.WebLoader", by_webdataset),
    "tar, wids": Format(["wids"], TAR[1], by_wids, partial(of_dicts, prefix=".")),
    "Parquet, datasets": Format(*PARQUET, by_datasets, of_dicts, "datasets, streamed", Streamed),
    "Arrow, pyarrow": Format(["pyarrow"], in_shards(write_arrow), arrows, of_dicts),
    "LitData": Format(
        ["litdata"], write_chunks, chunks, of_pairs,
        "litdata.StreamingDataLoader", by_litdata,
    ),
}  # fmt: skip

"""cache_dataset: the same samples and batches, built once, rebuilt when needed, and never half."""

import errno
import fcntl
import gc
import logging
import multiprocessing
import os
import pickle
import random
import re
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from alike import equal
from common_cache import (
    LOOKS,
    NOT_LOOKED_AT,
    Point,
    Samples,
    at,
    contents,
    drawing,
    pair,
    unreadable,
)
from logged import log_of
from on_ranks import caught, run, run_caught
from PIL import Image
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from pardata import cache_dataset, make_loader
from pardata.cache import _cache_dataset, _source

BUILDS = "pardata builds the cache in {}, or waits for the process that does"


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def told(caplog):
    """The log, from INFO on."""
    caplog.set_level(logging.INFO, logger="pardata")
    return caplog


# --- samples and batches ---


def test_samples_and_batches_are_those_of_the_source(tmp_path):
    source = Samples(pair)
    cached = cache_dataset(source, tmp_path)
    assert len(cached) == 10
    assert equal([cached[i] for i in range(10)], [source[i] for i in range(10)])
    assert equal(cached[-1], cached[9])
    plain = list(DataLoader(source, 4))
    assert equal(list(make_loader(cached, 4, device=None)), plain)
    assert equal(list(DataLoader(cached, 4)), plain)
    with pytest.raises(IndexError):
        cached[10]


def test_writing_to_a_sample_or_a_batch_does_not_change_the_cache(tmp_path):
    source = Samples(lambda i: {"x": torch.full((3,), i), "a": np.full(3, i), "n": torch.tensor(i)})
    cached = cache_dataset(source, tmp_path)
    before = contents(tmp_path)
    for sample in cached:
        sample["x"].fill_(99)
        sample["a"].fill(99)
        sample["n"].fill_(99)
    for batch in make_loader(cached, 4, device=None):
        for tensor in batch.values():
            tensor.fill_(99)
    for batch in make_loader(cached, 10, device=None):
        batch["x"].zero_()
    assert contents(tmp_path) == before
    assert equal([cached[i] for i in range(10)], [source[i] for i in range(10)])


# --- samples that cannot be read; the others: tests/promises/misuse_data.py ---


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_named_and_nothing_is_left(tmp_path, workers, short_tmp, monkeypatch):
    monkeypatch.setenv("TMPDIR", short_tmp)
    bad = Samples(at(NOT_LOOKED_AT, unreadable))
    with pytest.raises(RuntimeError, match="sample 4 cannot be cached: ValueError: bad pixel 4"):
        cache_dataset(bad, tmp_path / "cache", num_workers=workers)
    assert contents(tmp_path) == {}
    assert not list(tmp_path.glob("cache/pardata-building*"))


def test_an_image_file_that_is_cut_short_is_an_unreadable_sample(tmp_path):
    # PIL opens such a file gladly: it is decoded when its pixels are asked for.
    file = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16), np.uint8)).save(file, "PNG")

    def opened(index):
        whole = file.getvalue()
        return Image.open(BytesIO(whole[:150] if index == NOT_LOOKED_AT else whole))

    text = "sample 4 cannot be cached: OSError: image file is truncated"
    with pytest.raises(RuntimeError, match=text):
        cache_dataset(Samples(opened), tmp_path)


# --- several processes ---


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_any_number_of_workers_builds_the_same_files(tmp_path):
    for workers in (0, 2):
        source = Samples(drawing, 200)
        cache_dataset(source, tmp_path / str(workers), num_workers=workers)
        assert (len(source.reads) > 200) is (workers == 0)
    assert contents(tmp_path / "0") == contents(tmp_path / "2")


def _reader(_):
    return os.getpid()


@pytest.mark.parametrize(
    ("cores", "length", "here"), [(2, 1024, False), (2, 1023, True), (1, 1024, True)]
)
def test_by_default_a_large_data_set_is_decoded_by_all_cores(
    tmp_path, monkeypatch, cores, length, here
):
    monkeypatch.setattr(_source, "cpus_per_rank", lambda world: cores)
    cached = cache_dataset(Samples(_reader, length), tmp_path)
    readers = {cached[i] for i in range(length)}
    assert readers == {os.getpid()} if here else len(readers) == cores
    assert here or os.getpid() not in readers


def _states():
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002


@pytest.mark.parametrize("workers", [0, 2])
def test_the_generators_of_the_trainer_are_left_alone(tmp_path, workers):
    before, children = _states(), set(multiprocessing.active_children())
    for _ in range(2):
        cached = cache_dataset(Samples(drawing), tmp_path, num_workers=workers)
        list(make_loader(cached, 4))
        assert _states() == before
    failing = Samples(at(NOT_LOOKED_AT, unreadable, drawing))
    with pytest.raises(RuntimeError, match="bad pixel"):
        cache_dataset(failing, tmp_path / "other", num_workers=workers)
    assert _states() == before
    gc.collect()  # frames of the error hold workers
    assert set(multiprocessing.active_children()) <= children


# --- collective ---


def _cached_here(directory):
    source = Samples(pair)
    cached = cache_dataset(source, directory)
    again = cache_dataset(source, directory)
    batches = [batch[1].tolist() for batch in make_loader(cached, 6, device=None)]
    return len(source.reads), [cached[i][1] for i in range(10)], len(again), batches


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_rank_builds_and_all_read(tmp_path, size):
    first, *others = run(_cached_here, tmp_path, world_size=size)
    assert first[0] == LOOKS + 10 + LOOKS
    assert all(each[0] == 2 * LOOKS for each in others)
    for _, samples, length, _ in (first, *others):
        assert samples == list(range(10))
        assert length == 10
    steps = zip(*(each[3] for each in (first, *others)), strict=True)
    assert [list(chain(*shares)) for shares in steps] == [list(range(6)), list(range(6, 10))]


def _on_two_nodes(directory):
    rank = dist.get_rank()
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    os.environ["PARDATA_CACHE"] = f"{directory}/{rank // 2}"
    source = Samples(pair)
    cached = cache_dataset(source)
    with_warnings, _ = _warnings(f"{directory}/{rank // 2}/random")
    return len(source.reads), str(cached.directory.parent), cached[3][1], len(with_warnings)


def test_one_rank_of_each_node_builds_where_its_node_keeps_caches(tmp_path):
    # Ranks that nobody had before: nodes count their turns, and here they are others.
    found = run(_on_two_nodes, tmp_path, world_size=4, fresh=True)
    assert [reads for reads, *_ in found] == [LOOKS + 10, LOOKS, LOOKS + 10, LOOKS]
    assert [place for _, place, *_ in found] == [f"{tmp_path}/{node}" for node in (0, 0, 1, 1)]
    assert {sample for *_, sample, _ in found} == {3}
    assert [warned for *_, warned in found] == [1, 0, 0, 0]


ANOTHER = (
    "must be of this dataset, but is of another version or gone: call cache_dataset again, with "
    "the same dataset on every rank"
)


def _disagreeing(directory):
    pairs = {
        "class": (Samples(pair), Subset(Samples(pair), range(10))),
        "empty": (Samples(pair), Samples(pair, 0)),
        "shape": (Samples(pair), Samples(lambda i: (torch.zeros(3), i))),
    }
    return {
        what: caught(lambda s=sources: len(cache_dataset(s[dist.get_rank() == 1], directory)))
        for what, sources in pairs.items()
    }


@pytest.mark.parametrize(("directory", "size"), [(None, 3), ("given", 2)])
def test_ranks_with_other_data_sets_are_told_and_none_hangs(tmp_path, monkeypatch, directory, size):
    monkeypatch.setenv("PARDATA_CACHE", str(tmp_path))
    results = run(_disagreeing, directory and tmp_path / directory, world_size=size)
    for rank, found in enumerate(results):
        assert "but `the class` differs:\n" in found["class"].text
        assert "Subset of common_cache.Samples" in found["class"].text
        told = "RuntimeError: rank 1 failed in `cache_dataset`: " if rank != 1 else ""
        assert str(found["empty"]).startswith(f"{told}ValueError: `dataset` must have")
        if rank == 1:
            assert found["shape"].type == "RuntimeError"
            assert ANOTHER in found["shape"].text
        else:
            assert found["shape"] == 10


# --- built again, or not ---


def scaled(factor, sample):
    return sample[0] * factor, sample[1]


CHANGES = {
    "length": Samples(pair, 11),
    "transform": Samples(pair, transform=partial(scaled, 1)),
    "target_transform": "target",
    "contents": Samples(lambda i: (torch.full((2, 3), i + 0.5), i)),
    "last": Samples(at(9, lambda i: (torch.zeros(2, 3), i))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_source_is_built_again_and_the_log_says_so(tmp_path, name, told):
    old = Samples(pair)
    cache_dataset(old, tmp_path)
    told.clear()
    new = CHANGES[name]
    if new == "target":
        new = Samples(pair)
        new.target_transform = abs
    cached = cache_dataset(new, tmp_path)
    assert lines(told) == [BUILDS.format(tmp_path)]
    assert equal([cached[i] for i in range(len(new))], [new[i] for i in range(len(new))])
    stays = name in ("length", "contents")  # as of another dataset
    assert len(list(tmp_path.glob("pardata-files-*"))) == 1 + stays
    cache_dataset(old, tmp_path)
    assert len(old.reads) == 2 * LOOKS + 10 * (1 if stays else 2)


def test_an_unchanged_source_is_not_built_again(tmp_path, told, capsys):
    cache_dataset(Samples(pair, transform=scaled_by(2)), tmp_path)
    assert lines(told) == [BUILDS.format(tmp_path)]
    assert re.fullmatch(
        r"caching Samples: 1/1 in \d+\.\d s, samples/s [\d,]+\n", capsys.readouterr().err
    )
    told.clear()
    before = contents(tmp_path)
    for _ in range(2):
        source = Samples(pair, transform=scaled_by(2))  # at another address
        cache_dataset(source, tmp_path)
        assert len(source.reads) == LOOKS
    assert lines(told) == []
    assert capsys.readouterr().err == ""
    assert contents(tmp_path) == before


def scaled_by(factor):
    return lambda sample: scaled(factor, sample)


def test_the_order_of_the_keys_is_no_change(tmp_path):
    cache_dataset(Samples(lambda i: {"x": i, "y": -i}), tmp_path)
    source = Samples(lambda i: {"y": -i, "x": i})
    cached = cache_dataset(source, tmp_path)
    assert len(source.reads) == LOOKS
    assert cached[3] == source[3]
    (batch,) = make_loader(cached, 10, device=None)
    assert {key: value.tolist()[3] for key, value in batch.items()} == {"y": -3, "x": 3}


@pytest.mark.parametrize("text", ["[]", "\xff"])
def test_what_an_older_cache_says_of_its_source_may_be_damaged(tmp_path, told, text):
    cache_dataset(Samples(pair), tmp_path)
    (said,) = tmp_path.glob("pardata-files-*/source.json")
    said.write_text(text, encoding="latin-1")
    told.clear()
    assert len(cache_dataset(Samples(pair, 11), tmp_path)) == 11
    assert lines(told) == [BUILDS.format(tmp_path)]


def test_another_subset_builds_the_cache_again(tmp_path):
    source = Samples(lambda i: i, 101)
    for left_out in (5, 6):  # as leave-one-out does
        kept = [i for i in range(101) if i != left_out]
        assert list(cache_dataset(Subset(source, kept), tmp_path)) == kept


class Listing(Samples):
    """Whose labels are in attributes, or in those of a dataset that it holds."""

    def __init__(self, length, **attributes):
        super().__init__(lambda i: i, length)
        vars(self).update(attributes)


N = 2003  # of these samples number 17 is not among the 8
LABELS = [number % 5 for number in range(N)]
FIXED = [*LABELS[:17], 4, *LABELS[18:]]
LISTS = {
    "a list": lambda labels: labels,
    "pairs": lambda labels: [(f"/{n}.png", label) for n, label in enumerate(labels)],
    "nested lists": lambda labels: [[f"{n}.png", [label, 1]] for n, label in enumerate(labels)],
    "lists of several lengths": lambda labels: [
        [label] * (n % 3 + 1) for n, label in enumerate(labels)
    ],
    "floats": lambda labels: [(None, label / 7) for label in labels],
    "some are None": lambda labels: [None, *labels[1:]],
    "dicts": lambda labels: [{"file": n, "label": label} for n, label in enumerate(labels)],
    "a dict of columns": lambda labels: {"file": ["x"] * N, "label": labels},
    "two columns": lambda labels: [["x"] * N, np.array(labels)],
    "an array": np.array,
    "texts in an array": lambda labels: np.array(list(map(str, labels))),
    "numbers of NumPy": lambda labels: list(np.array(labels)),
    "floats in a tensor": lambda labels: torch.tensor(labels) / 7,
    "a tensor of rows": lambda labels: torch.tensor(labels).view(-1, 1).expand(-1, 40),
    "tensors": lambda labels: [torch.tensor([label]) for label in labels],
    "a dataset inside": lambda labels: Listing(N, samples=labels),
    "a subset inside": lambda labels: Subset(Listing(N, samples=labels), range(9)),
    "a data frame": lambda labels: Frame([["x", label] for label in labels]),
}


class Frame:
    """As a data frame of pandas."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def to_numpy(self):
        return np.array(self.rows, dtype=object)


Frame.__module__ = "pandas.core.frame"


@pytest.mark.parametrize("name", LISTS)
def test_one_corrected_label_builds_the_cache_again_in_its_place(name, tmp_path, told):
    for labels in (LABELS, LABELS, FIXED, FIXED):
        source = Listing(N, held=LISTS[name](labels))
        source.make = lambda i, labels=labels: labels[i]
        assert cache_dataset(source, tmp_path, num_workers=0)[17] == labels[17]
    assert lines(told) == [BUILDS.format(tmp_path)] * 2
    assert len(list(tmp_path.glob("pardata-files-*"))) == 1


def cache_labels(directory):
    """Cache on two nodes with disks of their own, of which one has the corrected label."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    source = Listing(N, held=[LABELS, FIXED][dist.get_rank()])
    return caught(cache_dataset, source, f"{directory}/{dist.get_rank()}")


def test_nodes_with_other_labels_are_told_on_every_rank(tmp_path):
    for raised in run(cache_labels, tmp_path, world_size=2, fresh=True):
        assert (
            "must pass the same to `cache_dataset`, but `the listed samples` differs" in raised.text
        )


def test_datasets_in_one_directory_keep_their_files(tmp_path, told):
    whole = Listing(N, held=LABELS)
    folds = [[n for n in range(100) if n % 5 != fold] for fold in range(2)]
    datasets = [
        whole, Listing(50, held=LABELS[:50]), Listing(N, held=FIXED[::-1]),
        *(Subset(whole, fold) for fold in folds),
        Subset(whole, range(20, 100)), Subset(whole, [*range(20), *range(40, 100)]),
    ]  # fmt: skip
    datasets[2].make = lambda i: -i  # the same class and length, other samples
    for _ in range(2):
        cached = [cache_dataset(dataset, tmp_path) for dataset in datasets]
        for dataset, each in zip(datasets, cached, strict=True):
            there = pickle.loads(pickle.dumps(each))
            assert [there[i] for i in range(len(dataset))] == [
                dataset[i] for i in range(len(dataset))
            ]
    assert len(lines(told)) == len(datasets)
    assert len(list(tmp_path.glob("pardata-files-*"))) == len(datasets)


def file_with(change):
    return lambda directory: change(next(directory.glob("pardata-files-*/1.bin")))


DAMAGES = {
    "a shorter file": file_with(lambda path: os.truncate(path, path.stat().st_size - 1)),
    "a longer file": file_with(lambda path: os.truncate(path, path.stat().st_size + 1)),
    "no files": lambda directory: [p.unlink() for p in directory.glob("pardata-files-*/*")],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_cache_is_built_again(tmp_path, told, name):
    place = tmp_path / "cache"
    cache_dataset(Samples(pair), place)
    before = contents(place)
    DAMAGES[name](place)
    assert contents(place) != before
    told.clear()
    cached = cache_dataset(Samples(pair), place)
    assert lines(told) == [BUILDS.format(place)]
    assert before.items() <= contents(place).items()
    assert cached[9][1] == 9


def test_an_existing_cache_stands_when_it_cannot_be_built_again(tmp_path):
    cached = cache_dataset(Samples(pair), tmp_path)
    before = contents(tmp_path)
    changed = (
        at(NOT_LOOKED_AT, unreadable, drawing),
        at(NOT_LOOKED_AT, lambda i: (i, float(i)), lambda i: (i, -i)),
    )
    for make in changed:
        with pytest.raises((RuntimeError, ValueError)):
            cache_dataset(Samples(make), tmp_path)
        assert contents(tmp_path) == before
        assert cached[9][1] == 9
    source = Samples(pair)
    cache_dataset(source, tmp_path)
    assert len(source.reads) == LOOKS


def test_files_of_the_user_in_the_directory_are_left_alone(tmp_path):
    own = ("train/building/1.jpg", "building/1.jpg", "0123456789abcdef/x", "manifest.json", "lock")
    for name in own:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    for length in (10, 11):
        assert len(cache_dataset(Samples(pair, length), tmp_path)) == length
    assert all((tmp_path / name).read_text() == "mine" for name in own)


# --- killed, at once, full, read-only ---


class Talking(Samples):
    """Says when it is asked for a sample, and then waits to be allowed to go on."""

    def __init__(self, at, pipe):
        super().__init__(pair, 200)
        self.at, self.pipe = at, pipe

    def __getitem__(self, index):
        if index == self.at:
            self.pipe.send(os.getpid())
            self.pipe.recv()
        return super().__getitem__(index)


# The same source, to the cache.
Talking.__qualname__, Talking.__module__ = Samples.__qualname__, Samples.__module__


def _lockless(*_):
    raise OSError(errno.ENOLCK, "No locks available")  # as on NFS or Lustre without them


def _build_slowly(directory, pipe, locks):
    if not locks:
        fcntl.flock = _lockless
    cached = cache_dataset(Talking(100, pipe), directory, num_workers=0)
    pipe.send([cached[i][1] for i in range(200)])


@contextmanager
def build_in_progress(directory, *, locks=True):
    """A process in the middle of building, and the pipe to it."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(
        target=_build_slowly, args=(directory, there, locks)
    )
    process.start()
    there.close()
    try:
        assert here.poll(60)
        assert here.recv() == process.pid
        assert list(directory.glob("pardata-building-*/0.bin"))
        yield process, here
    finally:
        process.kill()
        process.join()
        here.close()


def test_a_killed_build_keeps_the_last_cache_and_is_cleaned_up(tmp_path):
    with build_in_progress(tmp_path) as (process, _):
        process.kill()
    (left,) = tmp_path.glob("pardata-building-*")
    assert list(contents(tmp_path)) == [f"{left.name}/{file}" for file in ("0.bin", "1.bin")]
    cached = cache_dataset(Samples(pair), tmp_path)
    before = contents(tmp_path)
    with build_in_progress(tmp_path) as (process, _):
        assert pickle.loads(pickle.dumps(cached))[9][1] == 9  # the old one is read meanwhile
        process.kill()
    assert list(tmp_path.glob("pardata-building-*"))
    source = Samples(pair)
    assert cache_dataset(source, tmp_path)[9][1] == 9
    assert len(source.reads) == LOOKS
    assert before.items() <= contents(tmp_path).items()
    source = Samples(pair, 200)
    cached = cache_dataset(source, tmp_path)
    assert len(source.reads) == LOOKS + 200
    assert equal([cached[i] for i in range(200)], [pair(i) for i in range(200)])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name[:14] for name in names] == ["pardata-files-"] * 2 + ["pardata-lock"]


def _build_too(directory, pipe):
    class Passing(logging.Handler):
        def emit(self, record):
            pipe.send(record.getMessage())

    logging.getLogger("pardata").addHandler(Passing())
    logging.getLogger("pardata").setLevel(logging.INFO)
    source = Samples(pair, 200)
    cached = cache_dataset(source, directory, num_workers=0)
    pipe.send((len(source.reads), cached[199][1]))


@pytest.mark.parametrize("killed", [False, True])
def test_a_second_builder_waits_for_the_first_to_end(tmp_path, killed):
    to_second, there = multiprocessing.Pipe()
    second = multiprocessing.get_context("forkserver").Process(
        target=_build_too, args=(tmp_path, there)
    )
    with build_in_progress(tmp_path) as (first, to_first):
        second.start()
        assert to_second.poll(60)
        assert to_second.recv() == BUILDS.format(tmp_path)
        assert not list(tmp_path.glob("pardata-files-*"))
        if killed:
            first.kill()  # its lock goes with it
        else:
            to_first.send("go on")
        assert to_second.poll(60)
        assert to_second.recv() == (LOOKS + 200 * killed, 199)
        second.join()
        assert second.exitcode == 0
    to_second.close()


def test_concurrent_builds_without_locks_keep_the_first_files(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", _lockless)
    with build_in_progress(tmp_path, locks=False) as (_, to_first):
        cached = cache_dataset(Samples(pair, 200), tmp_path, num_workers=0)
        (published,) = tmp_path.glob("pardata-files-*")
        written = published.stat().st_ino
        assert [cached[i][1] for i in range(200)] == [*range(200)]
        to_first.send("go on")
        assert to_first.poll(60)
        assert to_first.recv() == [*range(200)]
    assert published.stat().st_ino == written  # the one that came first
    assert not list(tmp_path.glob("pardata-building*"))


def test_what_a_build_of_another_host_has_begun_is_left_alone(tmp_path):
    other = tmp_path / "pardata-building-other-1"
    other.mkdir()
    cache_dataset(Samples(pair), tmp_path)
    assert other.exists()


def _limited(directory):
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    return len(cache_dataset(Samples(pair, 1000), directory, num_workers=0))


def test_a_write_error_in_a_build_keeps_the_last_cache(tmp_path):
    pytest.importorskip("resource")
    cache_dataset(Samples(pair), tmp_path)
    before = contents(tmp_path)
    for raised in run_caught(_limited, tmp_path, world_size=2, fresh=True):
        assert f"OSError: [Errno {errno.EFBIG}] " in str(raised)
        assert f"{tmp_path}/pardata-building-" in raised.text
    assert contents(tmp_path) == before
    assert not list(tmp_path.glob("pardata-building*"))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte, and how to make it read-only."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root of a Linux can mount a small disk")
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if (done := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"this root cannot mount a small disk: {done.stderr.strip()}")
    yield place, lambda: subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("samples", [(bytes, 3000), (lambda _: bytes(2**18), 8)])
def test_a_disk_that_fills_up_is_an_error_and_nothing_is_left(samples, small_disk):
    place, _ = small_disk
    with pytest.raises(OSError, match=r"No space left on device: .*pardata-building-") as raised:
        cache_dataset(Samples(*samples), place, num_workers=0)
    assert raised.value.errno == errno.ENOSPC
    assert [path.name for path in place.iterdir()] == ["pardata-lock"]


def test_a_cache_that_another_process_replaced_raises(tmp_path, monkeypatch):
    cache_dataset(Samples(pair), tmp_path / "other")
    # Built, and replaced at once.
    monkeypatch.setattr(_cache_dataset, "build_if_missing", lambda *_: None)
    for directory in ("other", "gone"):
        with pytest.raises(RuntimeError, match=f"{tmp_path / directory} {ANOTHER}"):
            cache_dataset(Samples(lambda i: pair(i + 1)), tmp_path / directory)


def test_a_cache_on_a_disk_for_reading_only_is_read(small_disk):
    place, make_read_only = small_disk
    cache_dataset(Samples(pair), place)
    make_read_only()
    source = Samples(pair)
    cached = cache_dataset(source, place)
    assert len(source.reads) == LOOKS
    assert cached[9][1] == 9
    with pytest.raises(OSError, match="Read-only file system") as raised:
        cache_dataset(Samples(pair, 11), place)
    assert raised.value.errno == errno.EROFS
    assert str(place) in str(raised.value)
    del cached


def test_it_works_without_locks_as_on_windows(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    cached = cache_dataset(Samples(pair), tmp_path)
    assert equal([cached[i] for i in range(10)], [pair(i) for i in range(10)])


# --- random samples ---

WARNING = (
    "the samples of Samples differ at each reading: move random transforms to `batch_transform`"
)


def _warnings(directory):
    with log_of() as log:
        cached = cache_dataset(Samples(drawing), directory)
    return log.lines, cached[3].tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_random_transform_is_warned_of_once_on_one_rank(tmp_path, size):
    (first, sample), *others = run(_warnings, tmp_path, world_size=size)
    assert first == [f"[0/{size}] {WARNING}" if size > 1 else WARNING]
    assert others == [([], sample)] * (size - 1)


def test_a_random_source_is_not_built_again_for_being_random(tmp_path, monkeypatch, told):
    monkeypatch.setenv("PARDATA_CACHE", str(tmp_path))
    own = random.Random(0)
    for make in (drawing, lambda i: i + own.random()):  # seeded by us, and by nobody
        found = [cache_dataset(Samples(make)) for _ in range(3)]
        assert list(map(str, found[0])) == list(map(str, found[2]))
        assert len({each.directory for each in found}) == 1
    assert len(list(tmp_path.iterdir())) == 2
    assert lines(told).count(WARNING) == 6


# --- workers and memory ---


def mappings(directory, pid="self"):
    """Return how a process has the files mapped: how, whether read, and bytes of its own."""
    found = []
    for part in Path(f"/proc/{pid}/smaps").read_text().split("VmFlags:"):
        for line in part.splitlines():
            if f"{directory}/pardata-files-" in line:
                sizes = dict(re.findall(r"(\w+): +(\d+) kB", part))
                found.append((line.split()[1], int(sizes["Rss"]) > 0, int(sizes["Private_Dirty"])))
    return found


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_read_whole_batches_and_have_no_copy(tmp_path, start, short_tmp, monkeypatch):
    monkeypatch.setenv("TMPDIR", short_tmp)
    source = Samples(lambda i: Point(torch.full((1000,), i), {"n": i}), 100)
    cached = cache_dataset(source, tmp_path)
    plain = list(make_loader(cached, 30, num_workers=0, device=None))
    children = set(multiprocessing.active_children())
    options = {"multiprocessing_context": start, "persistent_workers": True, "device": None}
    loader = make_loader(cached, 30, num_workers=1, **options)
    assert equal(list(loader), plain)
    if sys.platform == "linux":
        (worker,) = set(multiprocessing.active_children()) - children
        assert mappings(tmp_path, worker.pid) == [("r--s", True, 0)] * 2


def test_what_is_sent_to_a_worker_is_small_and_holds_no_data(tmp_path):
    big = torch.arange(1_000_000.0).view(1000, 1000)
    source = Samples(lambda i: big[i], 1000, transform=lambda x: x)
    source.kept = big
    cached = cache_dataset(source, tmp_path)
    sent = pickle.dumps(cached)
    assert len(sent) < 4 * 1000 + 3000  # a sample, and a little
    there = pickle.loads(sent)
    assert torch.equal(there[999], big[999])
    for indices in ([5, 1], torch.tensor([5, 1])):
        assert torch.equal(there.read_batch(indices), big[[5, 1]])
    assert len(there) == 1000
    assert there.directory == cached.directory
    assert there.source is None
    assert cached.source is source


def test_unpickling_a_cache_that_was_rebuilt_raises(tmp_path):
    cached = cache_dataset(Samples(pair), tmp_path)
    sent = pickle.dumps(cached)
    cache_dataset(CHANGES["last"], tmp_path)
    with pytest.raises(RuntimeError, match=f"the cache in {tmp_path} {ANOTHER}"):
        pickle.loads(sent)
    if sys.platform != "win32":
        assert [cached[i][1] for i in range(10)] == list(range(10))  # it has them mapped


# --- where the files go ---


def place(dataset):
    return cache_dataset(dataset).directory


def test_caches_go_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = set()
    for own, shared, parent in [
        ("~/own", str(tmp_path / "xdg"), tmp_path / "home" / "own"),
        ("", str(tmp_path / "xdg"), tmp_path / "xdg" / "pardata"),
        (None, str(tmp_path / "xdg"), tmp_path / "xdg" / "pardata"),
        (None, "", tmp_path / "home" / ".cache" / "pardata"),
        (None, None, tmp_path / "home" / ".cache" / "pardata"),
    ]:
        for name, value in {"PARDATA_CACHE": own, "XDG_CACHE_HOME": shared}.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        folder = place(Samples(pair))
        assert folder.parent == parent
        found.add(folder.name)
    (name,) = found
    assert re.fullmatch("Samples-[0-9a-f]{16}", name)


def test_without_a_home_directory_one_must_be_given(tmp_path, monkeypatch):
    for name in ("HOME", "PARDATA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # as of a user without an entry
    with pytest.raises(ValueError, match=r"`directory` must be a path, but is '~/\.cache/pardata/"):
        cache_dataset(Samples(pair))
    assert len(cache_dataset(Samples(pair), tmp_path)) == 10


def test_a_link_to_a_directory_that_is_not_there_makes_it(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "cache")
    cache_dataset(Samples(pair), tmp_path / "link")
    assert list(tmp_path.glob("disk/cache/pardata-files-*"))


def test_data_sets_that_differ_have_folders_of_their_own(tmp_path, monkeypatch, told):
    monkeypatch.setenv("PARDATA_CACHE", str(tmp_path))
    whole = Samples(lambda i: i, 20)
    kinds = [
        whole,
        Samples(lambda i: i, 21),
        Samples(lambda i: -i, 20),
        Samples(lambda i: i, 20, transform=float),
        *random_split(whole, [10, 10], torch.Generator().manual_seed(0)),
        TensorDataset(torch.arange(10)),
        TensorDataset(torch.arange(10, 20)),
    ]
    found = [cache_dataset(dataset) for dataset in kinds]
    assert len({each.directory for each in found}) == len(kinds)
    told.clear()
    for dataset, each in zip(kinds, found, strict=True):
        assert place(dataset) == each.directory
        assert equal([each[i] for i in range(len(dataset))], [dataset[i] for i in range(len(each))])
    assert lines(told) == []

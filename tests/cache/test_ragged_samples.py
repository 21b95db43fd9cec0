"""Samples whose shapes differ, in a cache: tokens, bytes, boxes, images; read by whole batches."""

import tempfile
from itertools import chain

import numpy as np
import pytest
import torch
from alike import equal
from common_cache import Samples, contents
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import run
from PIL import Image
from torch.utils.data import Subset

from pardata import CachedDataset, cache_dataset, make_loader


def unlike(i):
    """A sample of which nearly all differs in shape; some of it is empty."""
    return {
        "jpeg": bytes(range(7 * i % 5)),
        "tokens": [i, *range(i % 4)],
        "more": ([0.5 * i] * (1 - i % 2), {"boxes": torch.full((i % 3, 4), float(i))}),
        "array": np.full((3, 1 + i % 2), i, np.uint8),
        "same": (torch.full((2,), i), i),
    }


RAGGED = ["sample['array']", "sample['jpeg']", "sample['more'][0]", "sample['more'][1]['boxes']"]
RAGGED += ["sample['tokens']"]


def in_lists(samples):
    """Return the batch of such samples."""

    def column(of):
        return [torch.as_tensor(of(sample)) for sample in samples]

    return {
        "jpeg": [sample["jpeg"] for sample in samples],
        "tokens": column(lambda sample: sample["tokens"]),
        "more": [
            [torch.tensor(sample["more"][0], dtype=torch.float64) for sample in samples],
            {"boxes": column(lambda sample: sample["more"][1]["boxes"])},
        ],
        "array": column(lambda sample: sample["array"]),
        "same": [
            torch.stack(column(lambda sample: sample["same"][0])),
            torch.tensor([sample["same"][1] for sample in samples]),
        ],
    }


def plain(batch):
    """Return a batch whose lists are of one class."""
    if isinstance(batch, dict):
        return {key: plain(part) for key, part in batch.items()}
    return [*map(plain, batch)] if isinstance(batch, list) else batch


def batches(dataset, batch_size, **options):
    return [plain(batch) for batch in make_loader(dataset, batch_size, device=None, **options)]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_and_batches_have_each_its_own_shapes(tmp_path, workers, short_tmp, monkeypatch):
    monkeypatch.setenv("TMPDIR", short_tmp)
    samples = [unlike(i) for i in range(10)]
    cached = cache_dataset(Samples(unlike), tmp_path, num_workers=workers)
    assert equal([cached[i] for i in range(10)], samples)
    assert equal(cached[-1], cached[9])
    with pytest.raises(IndexError):
        cached[10]
    expected = [in_lists(samples[:4]), in_lists(samples[4:8]), in_lists(samples[8:])]
    assert equal(batches(cached, 4), expected)
    assert equal(batches(cached, 4, num_workers=workers), expected)
    assert equal(plain(cached.read_batch([7, -1])), in_lists([samples[7], samples[9]]))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_any_number_of_workers_builds_the_same_files(tmp_path):
    for workers in (0, 2):
        cache_dataset(Samples(unlike, 200), tmp_path / str(workers), num_workers=workers)
    assert contents(tmp_path / "0") == contents(tmp_path / "2")


def test_a_large_sample_after_small_ones_is_stored_too(tmp_path):
    cached = cache_dataset([b"a", b"b" * 2**20, b""], tmp_path)
    assert list(cached) == [b"a", b"b" * 2**20, b""]


def test_images_of_several_sizes_are_bytes_of_their_shapes(tmp_path):
    sizes = [(2, 3), (5, 1), (2, 3)]
    images = [Image.new("RGB", size, (1, 2, n)) for n, size in enumerate(sizes)]
    (batch,) = batches(cache_dataset(images, tmp_path), 3)
    assert [tuple(image.shape) for image in batch] == [(3, 3, 2), (3, 1, 5), (3, 3, 2)]
    assert [image[:, 0, 0].tolist() for image in batch] == [[1, 2, n] for n in range(3)]


def test_collate_fn_gets_the_samples_read_by_whole_batches(tmp_path, monkeypatch):
    cached = cache_dataset(Samples(unlike), tmp_path)
    monkeypatch.setattr(CachedDataset, "__getitem__", None)
    for data, numbers in ((cached, range(10)), (Subset(cached, [9, 1, 4]), [9, 1, 4])):
        for options in ({}, {"microbatch_size": 2}):
            loader = make_loader(data, 4, collate_fn=lambda samples: samples, **options)
            found = chain.from_iterable(loader)
            found = [*chain.from_iterable(found)] if options else [*found]
            assert equal(found, [unlike(i) for i in numbers])


def _shares(directory):
    cached = cache_dataset(Samples(unlike), directory)
    loader, again = (
        make_loader(cached, 4, shuffle=True, drop_last=False, seed=1) for _ in range(2)
    )
    whole = []
    for batch in loader:
        whole.append(plain(batch))
        if len(whole) == 1:
            again.load_state_dict(loader.state_dict())
    return whole, [plain(batch) for batch in again]


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_get_their_shares_and_resume(tmp_path, size):
    found = run(_shares, tmp_path, world_size=size)
    seen = []
    for whole, rest in found:
        assert equal(whole[1:], rest)
        for batch in whole:
            numbers = batch["same"][1].tolist()
            assert equal(batch, in_lists([unlike(i) for i in numbers]))
            seen += numbers
    assert sorted(seen) == list(range(10))


def _evaluated(directory):
    cached = cache_dataset(Samples(unlike, 4), directory)
    return batches(cached, 3), batches(cache_dataset([b"a"] * 4, directory / "bytes"), 3)


def test_a_rank_without_samples_gets_empty_lists(tmp_path):
    first, *others = run(_evaluated, tmp_path, world_size=3)
    assert equal(first[0][1], in_lists([unlike(3)]))
    assert first[1] == [[b"a"], [b"a"]]
    for mixed, texts in others:
        empty = mixed[1]
        assert empty["jpeg"] == empty["tokens"] == empty["array"] == []
        assert empty["more"] == [[], {"boxes": []}]
        assert [part.shape for part in empty["same"]] == [(0, 2), (0,)]
        assert texts == [[b"a"], []]


PARTS = {
    "bytes": st.binary(max_size=5),
    "tokens": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    "scores": st.lists(st.floats(allow_nan=False), min_size=1, max_size=4),
    "flags": st.lists(st.booleans(), min_size=1, max_size=4),
}


@settings(max_examples=40)
@given(st.sampled_from(sorted(PARTS)).flatmap(lambda name: st.lists(PARTS[name], min_size=1)))
def test_any_lists_and_bytes_come_back(samples):
    with tempfile.TemporaryDirectory() as directory:
        cached = cache_dataset(samples, directory, num_workers=0)
        assert equal([cached[i] for i in range(len(samples))], samples)
        assert equal(cached.__getitems__(range(len(samples))), samples)

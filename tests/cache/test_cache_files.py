"""The files of a cache: their sizes and pages, the manifest, the lock, and what is left behind."""

import errno
import json
import logging
import multiprocessing
import os
import re
import sys
import threading
from pathlib import Path

import pytest
import torch

from pardata.cache import _cache_files
from pardata.cache._cache_files import (
    Field,
    building,
    create_files,
    locked,
    map_fields,
    publish,
    read_manifest,
)
from pardata.testing._run import _context

DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "complex64", "complex128"),
]
PAIR = [Field("sample[0]", "float32", (2, 3)), Field("sample[1]", "int64", ())]


def build(directory, name="a", fields=PAIR, length=4):
    with building(directory) as unfinished:
        create_files(unfinished, fields, length)
        for number, tensor in enumerate(map_fields(unfinished, fields, length, writable=True)):
            tensor.fill_(number + 1)
        publish(directory, name, {"length": length}, fields)


def names(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


BUILT = ["pardata-cache.json", "pardata-files-a", "pardata-files-a/0.bin", "pardata-files-a/1.bin"]


# --- the pages ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 2), (0,), (2, 0)])
def test_what_is_written_is_read_whatever_its_dtype_and_shape(tmp_path, dtype, shape):
    field = Field("sample", dtype, shape)
    create_files(tmp_path / "files", [field], 5)
    assert (tmp_path / "files" / "0.bin").stat().st_size == field.size_in_bytes(5)
    (written,) = map_fields(tmp_path / "files", [field], 5, writable=True)
    bits = torch.randint(0, 2, (field.size_in_bytes(5),), dtype=torch.uint8)
    written.view(-1).view(torch.uint8).copy_(bits)
    (found,) = map_fields(tmp_path / "files", [field], 5)
    assert found.dtype == getattr(torch, dtype)
    assert found.shape == (5, *shape)
    assert torch.equal(found.view(-1).view(torch.uint8), bits)


def test_each_field_has_a_file_of_its_own(tmp_path):
    create_files(tmp_path / "files", PAIR, 4)
    assert names(tmp_path / "files") == ["0.bin", "1.bin"]
    first, second = map_fields(tmp_path / "files", PAIR, 4, writable=True)
    first.fill_(1)
    second.fill_(2)
    first, second = map_fields(tmp_path / "files", PAIR, 4)
    assert torch.equal(first, torch.ones(4, 2, 3))
    assert torch.equal(second, torch.full((4,), 2))


def test_mappings_of_a_file_share_its_pages(tmp_path):
    create_files(tmp_path / "files", PAIR, 4)
    (_, reader) = map_fields(tmp_path / "files", PAIR, 4)
    (_, writer) = map_fields(tmp_path / "files", PAIR, 4, writable=True)
    writer[3] = 7
    assert reader.tolist() == [0, 0, 0, 7]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_maps_the_file_for_reading_only(tmp_path):
    create_files(tmp_path / "files", PAIR, 4)
    fields = map_fields(tmp_path / "files", PAIR, 4)
    lines = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line
    ]
    assert len(lines) == len(fields) == 2
    assert all(line.split()[1] == "r--s" for line in lines)


@pytest.mark.skipif(sys.platform != "linux", reason="a sparse file of a terabyte")
def test_a_file_larger_than_the_memory_can_be_mapped(tmp_path):
    length = 2**40 // 8
    try:
        with (tmp_path / "0.bin").open("wb") as file:
            file.truncate(length * 8)
    except OSError as error:
        pytest.skip(f"this file system has no sparse files of a terabyte: {error}")
    (field,) = map_fields(tmp_path, [Field("sample", "int64", ())], length)
    assert field[length - 1] == 0


def test_a_mapping_warns_of_nothing_and_leaves_warnings_as_they_are(tmp_path, recwarn):
    create_files(tmp_path / "files", PAIR, 4)
    map_fields(tmp_path / "files", PAIR, 4)
    assert not recwarn.list


# --- full disks ---


def test_a_file_that_does_not_fit_is_an_error_that_says_how_much_there_is_to_store(
    tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    text = f"No space left on device, and the cache takes 128 bytes: '{tmp_path}/files/0.bin'"
    with pytest.raises(OSError, match=re.escape(text)) as raised:
        create_files(tmp_path / "files", PAIR, 4)
    assert raised.value.errno == errno.ENOSPC


def test_files_have_their_length_where_nothing_can_be_reserved(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    create_files(tmp_path / "files", PAIR, 4)
    assert [(tmp_path / "files" / name).stat().st_size for name in ("0.bin", "1.bin")] == [96, 32]


def test_a_manifest_that_does_not_fit_leaves_the_old_cache_and_nothing_new(tmp_path, monkeypatch):
    build(tmp_path, "a")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="No space left"):
        build(tmp_path, "b", length=9)
    assert names(tmp_path) == BUILT
    assert read_manifest(tmp_path)["source"] == {"length": 4}


# --- the manifest ---


def test_a_complete_cache_is_found(tmp_path):
    build(tmp_path)
    manifest = read_manifest(tmp_path)
    assert manifest["source"] == {"length": 4}
    assert manifest["fields"] == PAIR
    assert manifest["files"] == tmp_path / "pardata-files-a"
    assert names(tmp_path) == BUILT


def damage_manifest(change):
    def damage(directory):
        path = directory / "pardata-cache.json"
        path.write_text(change(path.read_text()))

    return damage


def damage_data(change):
    def damage(directory):
        change(directory / "pardata-files-a" / "1.bin")

    return damage


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def grow(path):
    os.truncate(path, path.stat().st_size + 1)


def remove(path):
    path.unlink()


def move_files(directory, to):
    """Put the files where a manifest may not look for them, and let it say so."""
    (directory / to).parent.mkdir(exist_ok=True)
    (directory / "pardata-files-a").rename(directory / to)
    damage_manifest(lambda text: text.replace("pardata-files-a", to))(directory)


DAMAGES = {
    "no manifest": lambda directory: (directory / "pardata-cache.json").unlink(),
    "an empty manifest": damage_manifest(lambda _: ""),
    "half a manifest": damage_manifest(lambda text: text[: len(text) // 2]),
    "another manifest": damage_manifest(lambda _: "[1, 2]"),
    "a null": damage_manifest(lambda _: "null"),
    "no fields": damage_manifest(lambda text: text.replace('"fields"', '"parts"')),
    "no length": damage_manifest(lambda text: text.replace('"length"', '"size"')),
    "another length": damage_manifest(lambda text: text.replace('"length": 4', '"length": 5')),
    "a length of text": damage_manifest(lambda text: text.replace('"length": 4', '"length": "4"')),
    "a source of text": damage_manifest(lambda text: text.replace('{\n  "length": 4\n }', '"4"')),
    "a dtype of another torch": damage_manifest(lambda text: text.replace("int64", "int65")),
    "a dtype that is none": damage_manifest(lambda text: text.replace("int64", "nn")),
    "not text": lambda directory: (directory / "pardata-cache.json").write_bytes(b"\xff\x00\xfe"),
    "a shorter file": damage_data(cut),
    "a longer file": damage_data(grow),
    "no file": damage_data(remove),
    "no files": lambda directory: (directory / "pardata-files-a").rename(directory / "elsewhere"),
    "files elsewhere": lambda directory: move_files(directory, "elsewhere"),
    "files in a folder of its own": lambda directory: move_files(directory, "in/pardata-files-a"),
    "files outside": lambda directory: move_files(directory, f"../{directory.name}-files-a"),
    "files at a path": lambda directory: move_files(
        directory, str(directory / "../pardata-files-")
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_cache_is_none(tmp_path, name):
    build(tmp_path)
    before = contents(tmp_path)
    DAMAGES[name](tmp_path)
    assert contents(tmp_path) != before
    assert read_manifest(tmp_path) is None


def test_a_directory_that_is_not_there_has_no_cache(tmp_path):
    assert read_manifest(tmp_path / "none") is None


# --- publishing ---


def test_publishing_removes_the_cache_before_and_nothing_else(tmp_path):
    own = ["building", "lock", "manifest.json", "pardata", "raw/0.bin", "train/building/1.jpg"]
    for name in own:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    build(tmp_path, "b")
    build(tmp_path, "c")
    (tmp_path / "pardata-cache.json").unlink()  # killed before it was written: nobody's
    build(tmp_path, "a")
    assert set(names(tmp_path)) == {*BUILT, *own, "raw", "train", "train/building"}
    assert all((tmp_path / name).read_text() == "mine" for name in own)


def test_the_same_source_can_be_built_again_and_who_reads_the_old_files_goes_on(tmp_path):
    build(tmp_path)
    old = map_fields(tmp_path / "pardata-files-a", PAIR, 4)
    build(tmp_path)
    build(tmp_path, "b")
    assert old[1].tolist() == [2] * 4
    assert names(tmp_path)[1:] == [name.replace("-a", "-b") for name in BUILT[1:]]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_build_that_fails_leaves_the_old_cache_and_nothing_new(tmp_path, error):
    build(tmp_path)

    def fail(directory):
        create_files(directory, PAIR, 4)
        assert (tmp_path / "pardata-building" / "0.bin").exists()
        raise error

    with pytest.raises(error), building(tmp_path) as directory:
        fail(directory)
    assert names(tmp_path) == BUILT


def test_what_a_killed_build_left_is_removed(tmp_path):
    (tmp_path / "pardata-building" / "sub").mkdir(parents=True)
    (tmp_path / "pardata-building" / "7.bin").write_text("half")
    build(tmp_path)
    assert names(tmp_path) == BUILT


# --- the lock ---


class Waiting(logging.Handler):
    """Sets an event when somebody waits for the lock."""

    def __init__(self):
        super().__init__()
        self.seen = threading.Event()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())
        self.seen.set()


@pytest.fixture
def waiting():
    logger, handler = logging.getLogger("pardata.cache._cache_files"), Waiting()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_one_builds_while_the_other_waits_and_says_so(tmp_path, waiting):
    order = []

    def other():
        with locked(tmp_path):
            order.append("other")

    thread = threading.Thread(target=other)
    with locked(tmp_path):
        thread.start()
        assert waiting.seen.wait(60)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]
    assert waiting.lines == [f"[0/1] waits for the process that builds the cache in {tmp_path}"]


def test_a_free_lock_is_taken_without_a_word_and_the_directory_is_made(tmp_path, waiting):
    for _ in range(2):
        with locked(tmp_path / "a" / "b"):
            pass
    assert names(tmp_path) == ["a", "a/b", "a/b/pardata-lock"]
    assert not waiting.lines


def _hold(directory, pipe):
    with locked(directory):
        pipe.send("held")
        pipe.recv()


@pytest.mark.skipif(sys.platform == "win32", reason="no locks")
def test_the_lock_of_a_killed_process_is_free(tmp_path, waiting):
    here, there = multiprocessing.Pipe()
    process = _context().Process(target=_hold, args=(tmp_path, there))
    process.start()
    assert here.recv() == "held"
    entered = threading.Event()

    def other():
        with locked(tmp_path):
            entered.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert waiting.seen.wait(60)
    assert not entered.is_set()
    process.kill()
    process.join()
    thread.join(60)
    assert entered.is_set()


def test_without_fcntl_as_on_windows_there_is_no_lock(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with locked(tmp_path), locked(tmp_path):
        build(tmp_path)
    assert read_manifest(tmp_path) is not None


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with locked(tmp_path):
        build(tmp_path)
    assert read_manifest(tmp_path) is not None


def test_an_error_under_the_lock_comes_through_and_frees_it(tmp_path, waiting):
    with pytest.raises(OSError, match="mine"), locked(tmp_path):
        raise OSError(errno.EIO, "mine")
    with locked(tmp_path):
        assert not waiting.lines
    assert _cache_files.MANIFEST == "pardata-cache.json"

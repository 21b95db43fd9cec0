"""What a checkpoint's folder says it holds, and whether it is still that."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pardata.checkpoint._manifest import UnusableError, verified, write_manifest

FACTS = {
    "step": 3,
    "values": ["best"],
    "identity": {"processes": 1, "torch": "2", "strategies": {}},
}
CONTENTS = {"state.pt": b"some bytes", "sharded/.metadata": b"others", "sharded/__0_0.distcp": b""}


def written(folder):
    for name, content in CONTENTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    assert write_manifest(folder, FACTS) == 16
    return folder


def sign(folder, manifest):
    """Write a manifest as whoever means harm could."""
    text = json.dumps(manifest, sort_keys=True)
    signed = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": manifest}
    (folder / "manifest.json").write_text(json.dumps(signed))


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())["manifest"]


def check_unusable(folder, why):
    with pytest.raises(UnusableError, match=why):
        verified(folder)


def test_what_was_written_is_verified(tmp_path):
    manifest = verified(written(tmp_path))
    assert {name: manifest[name] for name in FACTS} == FACTS
    assert manifest["format"] == 1
    assert {name: size for name, (size, _) in manifest["files"].items()} == {
        name: len(content) for name, content in CONTENTS.items()
    }


ALL = [*CONTENTS, "manifest.json"]


@settings(max_examples=200)
@given(st.sampled_from(ALL), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_bit_that_flips_anywhere_is_found(file, where, bit):
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder)) / file
        content = bytearray(path.read_bytes())
        if not content:
            return
        content[int(where * len(content))] ^= 1 << bit
        path.write_bytes(content)
        try:
            found = verified(Path(folder))
        except UnusableError:
            return
        # Only blanks between the words of the manifest say nothing.
        assert file == "manifest.json"
        assert found == verified(written(Path(folder)))


@settings(max_examples=100)
@given(st.sampled_from(ALL), st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_short_is_found(file, where):
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder)) / file
        content = path.read_bytes()
        if content:
            path.write_bytes(content[: int(where * len(content))])
            check_unusable(Path(folder), "has .* bytes and should have|damaged")


@pytest.mark.parametrize("file", ALL)
def test_what_is_missing_is_named(file, tmp_path):
    (written(tmp_path) / file).unlink()
    check_unusable(tmp_path, f"^{Path(file).name} is missing")


def test_a_changed_file_of_the_same_size_is_named(tmp_path):
    (written(tmp_path) / "state.pt").write_bytes(b"some bytez")
    check_unusable(tmp_path, r"^the checksum of state\.pt is wrong")


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["format", "files", "values", "identity", "step", "sha256", "manifest"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=100)
@given(st.binary(max_size=60) | json_like | st.integers(1000, 60_000))
def test_anything_in_the_place_of_the_manifest_is_unusable(content):
    if isinstance(content, int):
        content = b"[" * content
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    with tempfile.TemporaryDirectory() as folder:
        (written(Path(folder)) / "manifest.json").write_bytes(data)
        check_unusable(Path(folder), r"^manifest\.json is damaged|^the checksum of manifest")


@settings(max_examples=150)
@given(st.sampled_from([None, "files", "values", "identity", "step", "format"]), json_like)
def test_whatever_a_manifest_says_that_is_signed_it_is_usable_or_not(key, value):
    with tempfile.TemporaryDirectory() as folder:
        manifest = manifest_of(written(Path(folder)))
        sign(Path(folder), value if key is None else {**manifest, key: value})
        try:
            found = verified(Path(folder))
        except UnusableError:
            return
        assert isinstance(found["step"], int)
        assert all(isinstance(name, str) for name in found["values"])


def test_a_checksum_that_does_not_fit_is_told(tmp_path):
    text = (written(tmp_path) / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"step": 3', '"step": 4'))
    check_unusable(tmp_path, r"^the checksum of manifest\.json is wrong")


def test_a_foreign_format_is_told(tmp_path):
    sign(written(tmp_path), {**manifest_of(tmp_path), "format": 2})
    check_unusable(tmp_path, "^its format is 2, and this pardata reads 1")


def test_a_manifest_that_lacks_something_is_told(tmp_path):
    sign(written(tmp_path), {"format": 1, "files": {}})
    check_unusable(tmp_path, r"^manifest\.json does not say what it should")


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/../../secret", ".", "", "/", "..", "a\0b", "sharded/.."]
)
def test_nothing_outside_is_looked_at(name, tmp_path):
    (tmp_path / "secret").write_text("secret")
    folder = written(tmp_path / "checkpoint")
    sign(folder, {**manifest_of(folder), "files": {name: [6, "0" * 64]}})
    check_unusable(folder, "is no name of a file in it|is missing|is no file")


@pytest.mark.parametrize("linked", [".", *ALL, "sharded"])
def test_a_link_is_not_followed(linked, tmp_path):
    folder = written(tmp_path / "checkpoint")
    shutil.move(folder / linked, tmp_path / "elsewhere") if linked != "." else folder.rename(
        tmp_path / "elsewhere"
    )
    (folder / linked if linked != "." else folder).symlink_to(tmp_path / "elsewhere")
    check_unusable(folder, "is a link, which may lead out of the directory")


def test_a_pipe_is_not_waited_for(tmp_path):
    (written(tmp_path) / "state.pt").unlink()
    os.mkfifo(tmp_path / "state.pt")
    check_unusable(tmp_path, r"^state\.pt is no file")
    (tmp_path / "manifest.json").unlink()
    os.mkfifo(tmp_path / "manifest.json")
    check_unusable(tmp_path, r"^manifest\.json is no file")


def test_a_folder_or_a_file_in_the_wrong_place_is_told(tmp_path):
    (written(tmp_path / "a") / "manifest.json").unlink()
    (tmp_path / "a" / "manifest.json").mkdir()
    check_unusable(tmp_path / "a", r"^manifest\.json is no file")
    (tmp_path / "b").touch()
    check_unusable(tmp_path / "b", "^it cannot be read")

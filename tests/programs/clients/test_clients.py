"""Other people's scripts: each as plain PyTorch, and with pardata by changing a few lines.

What is changed is in a `.diff` of the same name, as ``diff -U1`` writes it.
"""

import contextlib
import importlib
import io
import os
import re
import runpy
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from launched import launched, torchrun_variables
from PIL import Image

from pardata import make_loader
from pardata.rng._seeds import loader_counts

HERE = Path(__file__).parent

NAMES = ["folder", "chars", "gan"]
MOST_CHANGED_LINES = 15

CLASSES = ("cat", "cow", "dog", "fox", "hen", "owl")
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]

# The weights files that a script leaves behind, and in which of their values.
RESULTS = {"folder": "checkpoints/last.pt", "chars": "chars.pt", "gan": "gan.pt"}
EXACT = {"folder": ["--exact", 4], "chars": ["--strategy", "exact"], "gan": ["--strategy", "exact"]}
# In float64 and without dropout, whose noise is each rank's own, only rounding is left.
# Batch norm without microbatches depends on the number of processes, so a model without it.
ROUNDED = {
    "folder": ["--arch", "resnet18", "--norm", "group", "--size", 16],
    "chars": ["--dropout", 0],
    "gan": ["--dropout", 0],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_photos_and_words(folder)
    return folder


def write_photos_and_words(folder):
    """Write photos of six kinds, each in a color of its own, and a file of words."""
    noise = np.random.default_rng(0)
    for part, images in (("train", 8), ("val", 5)):
        for number, kind in enumerate(CLASSES):
            directory = folder / "photos" / part / kind
            directory.mkdir(parents=True)
            for image in range(images):
                pixels = noise.integers(0, 100, (72, 72, 3))
                pixels[..., number % 3] += 100 + 50 * (number // 3)
                Image.fromarray(pixels.astype("uint8")).save(directory / f"{image}.jpg")
    (folder / "words.txt").write_text("\n".join(WORDS + [a + b for a in "abc" for b in WORDS]))


def arguments(name, data):
    return {
        "folder": [
            *(data / "photos", "--arch", "shufflenet_v2_x0_5", "--size", 64, "--epochs", 2),
            *("--batch-size", 16, "--workers", 0, "--lr", 0.02, "--print-freq", 1),
        ],
        "chars": [data / "words.txt", "--epochs", 3, "--batch-size", 16],
        "gan": ["--epochs", 2],
    }[name]


def patched(plain, changes):
    """Return the lines of a script after those changes."""
    done, at = [], 0
    for line in changes:
        if hunk := re.match(r"@@ -(\d+)", line):
            done += plain[at : int(hunk[1]) - 1]
            at = int(hunk[1]) - 1
        elif line.startswith("+"):
            done.append(line[1:])
        else:
            assert plain[at] == line[1:], "the plain script is not what the changes are of"
            done += plain[at : at + 1] if line.startswith(" ") else []
            at += 1
    return done + plain[at:]


def written(script, directory):
    """Write a script, with pardata where its name says so, and return its path."""
    name = script.removesuffix("_pardata")
    lines = (HERE / f"{name}.py").read_text().splitlines()
    if script != name:
        lines = patched(lines, (HERE / f"{name}.diff").read_text().splitlines())
    file = directory / f"{script}.py"
    file.write_text("\n".join(lines) + "\n")
    return str(file)


# ------------------------------------------------------------------ running a script, for real


def as_script(file, args, directory, dtype):
    """Run a script as ``python`` would, with warnings as errors, and return what it printed."""
    os.chdir(directory)
    loader_counts.clear()  # a script begins in a process of its own
    torch.set_default_dtype(dtype)
    warnings.simplefilter("error")
    sys.argv = [file, *map(str, args)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        runpy.run_path(file, run_name="__main__")
    return printed.getvalue()


def no_variables(*_facts):
    """What a process has that nobody launched: multiprocessing has started it here."""
    return {"PARDATA_LAUNCHER": "none"}


def printed(script, args, directory, *, size=None, dtype=torch.float32):
    """Run a script in `directory`, alone or on `size` ranks, and return what it printed."""
    directory.mkdir(parents=True, exist_ok=True)
    file, variables = written(script, directory), torchrun_variables if size else no_variables
    first, *others = launched(
        as_script, file, args, directory, dtype, size=size or 1, variables=variables
    )
    assert isinstance(first, str), first
    assert others == [""] * len(others), "rank 0 alone speaks"
    return first


def trained(script, args, directory, **options):
    """Run a script, and return what it printed and saved."""
    return printed(script, args, directory, **options), saved(script, directory)


def saved(script, directory):
    state = torch.load(directory / RESULTS[script.removesuffix("_pardata")])
    return {name: value for name, value in flat(state).items() if torch.is_tensor(value)}


def flat(state, path=""):
    if not isinstance(state, dict):
        return {path: state}
    return {k: v for key in state for k, v in flat(state[key], f"{path}/{key}").items()}


def numbers(text):
    """Return the numbers that a script printed, without ranks and a busy machine's warning."""
    steady = re.sub(r".*the epoch waited .*", "", text)
    return [float(number) for number in re.findall(r"(?<![\[/])\b\d+\.\d+\b", steady)]


def assert_close(one, other):
    """Both what was printed and what was saved."""
    assert numbers(one[0]) == pytest.approx(numbers(other[0]), rel=1e-5)
    assert len(numbers(one[0])) > 2
    assert one[1].keys() == other[1].keys()
    for key, value in one[1].items():  # by length: a small part of a tensor has more rounding
        one_tensor, other_tensor = value.double(), other[1][key].double()
        apart = (one_tensor - other_tensor).norm()
        assert apart <= 1e-5 * other_tensor.norm() + 1e-8, f"{key} differs by {apart:.2g}"


# ----------------------------------------------------------------------------- what is changed


@pytest.mark.parametrize("name", sorted(file.stem for file in HERE.glob("*.diff")))
def test_a_script_is_ported_by_changing_at_most_15_lines(name):
    assert "pardata" not in (HERE / f"{name}.py").read_text()
    changes = [line[:1] for line in (HERE / f"{name}.diff").read_text().splitlines()]
    assert 0 < max(changes.count("+"), changes.count("-")) <= MOST_CHANGED_LINES


# ---------------------------------------------------------------- the same in one and in several

SIZES = [2, pytest.param(3, marks=pytest.mark.soak)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_several_processes_learn_what_one_learns(name, size, data, tmp_path):
    args = [*arguments(name, data), *ROUNDED[name]]
    script = f"{name}_pardata"
    alone = trained(script, args, tmp_path / "alone", dtype=torch.float64)
    together = trained(script, args, tmp_path / "together", size=size, dtype=torch.float64)
    assert_close(alone, together)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_exact_weights_are_those_of_one_process_to_the_last_bit(name, size, data, tmp_path):
    args = [*arguments(name, data), *EXACT[name]]
    script = f"{name}_pardata"
    text, weights = trained(script, args, tmp_path / "alone")
    text_of_others, weights_of_others = trained(script, args, tmp_path / "together", size=size)
    assert weights.keys() == weights_of_others.keys()
    for key, value in weights_of_others.items():
        assert torch.equal(weights[key], value), key
    if name != "folder":  # an evaluation runs on shares, whose sizes are not the same
        assert re.sub(r"\[0/3\] .*: ranks 2 to 2 idle; .*\n", "", text_of_others) == text


# --------------------------------------------------------------------- the same as the plain


def test_the_ported_character_model_equals_the_plain_one(data, tmp_path):
    whole = ["--batch-size", 4 * len(WORDS)]
    args = [*arguments("chars", data), *whole, *ROUNDED["chars"]]
    plain = trained("chars", args, tmp_path / "plain", dtype=torch.float64)
    for size in (None, 2):
        ported = trained(
            "chars_pardata", args, tmp_path / str(size), size=size, dtype=torch.float64
        )
        assert_close(plain, ported)


def with_our_batches(args, directory):
    """Run the plain folder trainer on the batches of `make_loader`."""
    sys.path.insert(0, str(HERE))
    folder = importlib.import_module("folder")
    folder.DataLoader = make_loader
    os.chdir(directory)
    torch.set_default_dtype(torch.float64)
    sys.argv = ["folder.py", *map(str, args)]
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        folder.main()
    return told.getvalue()


def test_the_folder_trainer_is_the_plain_one_on_the_same_batches(data, tmp_path):
    args = [*arguments("folder", data), *ROUNDED["folder"], "--epochs", 1]
    (tmp_path / "plain").mkdir()
    (text,) = launched(with_our_batches, args, tmp_path / "plain", size=1, variables=no_variables)
    assert isinstance(text, str), text
    plain = text, saved("folder", tmp_path / "plain")
    for size in (None, 2):
        ported = trained(
            "folder_pardata", args, tmp_path / str(size), size=size, dtype=torch.float64
        )
        assert_close(plain, ported)


def test_a_checkpoint_of_the_plain_folder_trainer_is_evaluated_alike_by_both(data, tmp_path):
    args = arguments("folder", data)
    text = printed("folder", args, tmp_path)
    accuracies = [numbers(line)[1] for line in text.splitlines() if line.startswith("validation")]
    args = [*args, "--evaluate", tmp_path / "checkpoints/best.pt"]
    plain = numbers(printed("folder", args, tmp_path))
    assert plain[1] == max(accuracies)
    for size in (None, 2):
        ported = numbers(printed("folder_pardata", args, tmp_path, size=size))
        assert ported == pytest.approx(plain, rel=1e-5)


def test_the_gan_begins_as_the_plain_one_does(tmp_path):
    # The plain one draws its noise in the loop: what it learns from then on must differ.
    args = ["--epochs", 0]
    _, plain = trained("gan", args, tmp_path / "plain")
    for size in (None, 2):
        _, ported = trained("gan_pardata", args, tmp_path / str(size), size=size)
        torch.testing.assert_close(plain, ported, rtol=0, atol=0)

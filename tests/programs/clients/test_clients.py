"""Other people's scripts: each as plain PyTorch, and with pardata by changing a few lines.

What is changed is in a `.diff` of the same name, as ``diff -U1`` writes it. All scripts of a size
run one after the other in the same processes, which `init` joins once.
"""

import contextlib
import importlib.util
import io
import logging
import os
import re
import runpy
import sys
import tarfile
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from launched import launched, torchrun_variables
from PIL import Image
from sklearn.datasets import load_digits

from pardata import make_loader

HERE = Path(__file__).parent
MOST_CHANGED_LINES = 15

CLASSES = ("cat", "cow", "dog", "fox", "hen", "owl")
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
SHARDS = 6

# What a script is given, beside where its data is: of plain PyTorch, and more with pardata.
PLAIN = {
    "detect": ["--epochs", 2, "--images", 40],
    "lm": ["--epochs", 2, "--batch-size", 12, "--dropout", 0],
    "tars": ["--epochs", 2],
    "imagenet": [
        *("--arch", "shufflenet_v2_x0_5", "--size", 64, "--epochs", 2),
        *("--batch-size", 14, "--workers", 0, "--lr", 0.02),
    ],
}
FOLDERS = {"detect": [], "lm": ["words.txt"], "tars": ["shards"], "imagenet": ["photos"]}
# In float64 and without dropout, whose noise is each rank's own, only rounding is left.
ROUNDED = {name: [] for name in PLAIN} | {"lm fsdp": ["--strategy", "fsdp"]}
EXACT = {
    "detect exact": ["--exact", 4],
    "lm exact": ["--strategy", "exact", "--dropout", 0.1],
    "imagenet exact": ["--exact", 4],
}
LONG_ROUNDED = {
    "lm compiled": ["--compile"],
    "lm fsdp compiled": ["--strategy", "fsdp", "--compile"],
}
LONG_EXACT = {"lm exact compiled": [*EXACT["lm exact"], "--compile"]}
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


def rows(short, long):
    """Return the cells of two tables, with the marks that each needs."""
    needs = pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers")
    return [
        pytest.param(cell, marks=[needs] * cell.startswith("lm") + [pytest.mark.soak] * is_long)
        for table, is_long in ((short, False), (long, True))
        for cell in table
    ]


# ----------------------------------------------------------------------------- the data


def write_photos_and_words(folder):
    """Write photos of six kinds, each in a colour of its own, and a file of words."""
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


def write_shards(folder):
    """Write the first of scikit-learn's digits to tar files, as many to each."""
    folder.mkdir()
    images, labels = load_digits(return_X_y=True)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard, 200 - 200 % SHARDS, SHARDS):
                png = io.BytesIO()
                Image.fromarray((15 * images[number].reshape(8, 8)).astype("uint8")).save(
                    png, "png"
                )
                parts = {"png": png.getvalue(), "cls": str(labels[number]).encode()}
                for suffix, content in parts.items():
                    member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


# ------------------------------------------------------------------ running a script, for real


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


def as_script(file, args, directory, dtype):
    """Run a script as ``python`` would, with warnings as errors, and return what it printed."""
    os.chdir(directory)
    torch.set_default_dtype(dtype)
    warnings.simplefilter("error")
    sys.argv = [file, *map(str, args)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        runpy.run_path(file, run_name="__main__")
    return printed.getvalue()


def all_of(jobs):
    """Run scripts in this process, and return what each printed."""
    torch.set_num_threads(1)
    # The compiler says there, on machines with CUDA's files and no GPU, that there is none.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    return [as_script(*job) for job in jobs]


def all_plain(jobs):
    """The same for scripts of plain PyTorch, on the batches of `make_loader`."""
    torch.utils.data.DataLoader = make_loader
    return all_of(jobs)


def no_variables(*_facts):
    """What a process has that nobody launched."""
    return {}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return a function that runs cells on so many processes, once: what they printed and saved."""
    data = tmp_path_factory.mktemp("data")
    write_photos_and_words(data)
    write_shards(data / "shards")

    @cache
    def run_cells(long, size):
        cells = {**LONG_ROUNDED, **LONG_EXACT} if long else {**ROUNDED, **EXACT}
        if size == "plain":
            cells = dict.fromkeys(PLAIN, ())
        jobs = {}
        for cell, more in cells.items():
            name = cell.split()[0]
            if name == "lm" and not HAS_TRANSFORMERS:
                continue
            directory = tmp_path_factory.mktemp("run")
            file = written(name if size == "plain" else f"{name}_pardata", directory)
            args = [*(data / folder for folder in FOLDERS[name]), *PLAIN[name], *more]
            dtype = torch.float32 if "exact" in cell else torch.float64
            jobs[cell] = file, args, directory, dtype
        if size == "plain":
            texts = launched(all_plain, list(jobs.values()), size=1, variables=no_variables)
        else:
            # To compile takes a minute for each script, and longer where others use the cores.
            options = {"variables": torchrun_variables, "patience": 900 if long else 120}
            texts = launched(all_of, list(jobs.values()), size=size, **options)
        assert isinstance(texts[0], list), texts[0]
        assert texts[1:] == [[""] * len(jobs)] * (len(texts) - 1), "rank 0 alone speaks"
        return {
            cell: (text, tensors(job[2] / f"{cell.split()[0]}.pt"))
            for (cell, job), text in zip(jobs.items(), texts[0], strict=True)
        }

    return run_cells


def tensors(file):
    """Return the weights that a script left behind, by their names."""
    return {name: value for name, value in flat(torch.load(file)).items() if torch.is_tensor(value)}


def flat(state, path=""):
    if not isinstance(state, dict):
        return {path: state}
    return {k: v for key in state for k, v in flat(state[key], f"{path}/{key}").items()}


def numbers(text):
    return [float(number) for number in re.findall(r"\b\d+\.\d+\b", text)]


def assert_close(one, other):
    """Both what was printed and what was saved."""
    assert numbers(one[0]) == pytest.approx(numbers(other[0]), rel=1e-5)
    assert len(numbers(one[0])) > 2
    assert one[1].keys() == other[1].keys()
    for key, value in one[1].items():  # by length: a small part of a tensor has more rounding
        one_tensor, other_tensor = value.double(), other[1][key].double()
        apart = (one_tensor - other_tensor).norm()
        assert apart <= 1e-5 * other_tensor.norm() + 1e-8, f"{key} differs by {apart:.2g}"


# ------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("name", PLAIN)
def test_a_script_is_ported_by_changing_at_most_15_lines(name):
    assert "pardata" not in (HERE / f"{name}.py").read_text()
    changes = [line[:1] for line in (HERE / f"{name}.diff").read_text().splitlines()]
    assert 0 < max(changes.count("+"), changes.count("-")) <= MOST_CHANGED_LINES


@pytest.mark.parametrize("cell", rows(ROUNDED, LONG_ROUNDED))
def test_every_number_of_processes_learns_what_the_plain_script_does(cell, results):
    plain = results(False, "plain")[cell.split()[0]]
    for size in (1, 2, 3):
        assert_close(plain, results(cell in LONG_ROUNDED, size)[cell])


@pytest.mark.parametrize("cell", rows(EXACT, LONG_EXACT))
def test_exact_weights_are_the_same_to_the_last_bit(cell, results):
    _, weights = results(cell in LONG_EXACT, 1)[cell]
    for size in (2, 3):
        _, others = results(cell in LONG_EXACT, size)[cell]
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[name], others[name]) for name in weights)

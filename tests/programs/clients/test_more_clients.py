"""More scripts, each as plain PyTorch and with pardata: the same losses on 1, 2 and 3 processes.

All of a size run one after the other in the same processes, which `init` joins once.
"""

import importlib.util
import io
import logging
import tarfile
from functools import cache

import pytest
import test_clients
import torch
from launched import launched, torchrun_variables
from PIL import Image
from sklearn.datasets import load_digits
from test_clients import as_script, assert_close, flat, no_variables, written

from pardata import make_loader

SHARDS = 6
data = test_clients.data  # a fixture

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)

# What a script is given, beside where its data is: of plain PyTorch, and more with pardata.
PLAIN = {
    "detect": ["--epochs", 2, "--images", 40],
    "lm": ["--epochs", 2, "--batch-size", 12, "--dropout", 0],
    "tars": ["--epochs", 2],
    "imagenet": [
        *("--arch", "resnet18", "--norm", "group", "--size", 16, "--epochs", 2),
        *("--batch-size", 14, "--workers", 0, "--lr", 0.02),
    ],
}
FOLDERS = {"detect": [], "lm": ["words.txt"], "tars": ["shards"], "imagenet": ["photos"]}
ROUNDED = {
    "detect": [],
    "lm": [],
    "lm fsdp": ["--strategy", "fsdp"],
    "tars": [],
    "imagenet": [],
}
EXACT = {
    "detect exact": ["--exact", 4],
    "lm exact": ["--strategy", "exact", "--dropout", 0.1],
    "imagenet exact": [
        *("--exact", 4, "--arch", "shufflenet_v2_x0_5", "--norm", "batch", "--size", 64)
    ],
}
LONG_ROUNDED = {
    "lm compiled": ["--compile"],
    "lm fsdp compiled": ["--strategy", "fsdp", "--compile"],
}
LONG_EXACT = {"lm exact compiled": [*EXACT["lm exact"], "--compile"]}
CELLS = {**ROUNDED, **EXACT}
LONG_CELLS = {**LONG_ROUNDED, **LONG_EXACT}


def rows(*tables, mark=()):
    """Return the cells of tables, with the marks that each needs."""
    names = [name for table in tables for name in table]
    needs = {name: [needs_transformers] if name.startswith("lm") else [] for name in names}
    return [pytest.param(name, marks=[*needs[name], *mark]) for name in names]


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


@pytest.fixture(scope="module")
def results(data, tmp_path_factory):
    """Return a function that runs cells on so many processes, once: what they printed and saved."""
    write_shards(data / "shards")

    @cache
    def run_cells(long, size):
        cells = {name: [] for name in PLAIN} if size == "plain" else LONG_CELLS if long else CELLS
        jobs = {}
        for cell, more in cells.items():
            name = cell.split()[0]
            if name == "lm" and importlib.util.find_spec("transformers") is None:
                continue
            directory = tmp_path_factory.mktemp("run")
            file = written(name if size == "plain" else f"{name}_pardata", directory)
            args = [*(data / folder for folder in FOLDERS[name]), *PLAIN[name], *more]
            dtype = torch.float32 if cell in EXACT or cell in LONG_EXACT else torch.float64
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
    return {k: v for k, v in flat(torch.load(file)).items() if torch.is_tensor(v)}


ROUNDED_ROWS = [
    *rows(ROUNDED),
    *rows(LONG_ROUNDED, mark=[pytest.mark.soak]),
]
THREE = pytest.param(3, marks=pytest.mark.soak)
EXACT_ROWS = [*rows(EXACT), *rows(LONG_EXACT, mark=[pytest.mark.soak])]


@pytest.mark.parametrize("size", [1, 2, THREE])
@pytest.mark.parametrize("cell", ROUNDED_ROWS)
def test_every_number_of_processes_learns_what_the_plain_script_does(cell, size, results):
    plain = results(False, "plain")[cell.split()[0]]
    assert_close(plain, results(cell in LONG_CELLS, size)[cell])


@pytest.mark.parametrize("size", [2, THREE])
@pytest.mark.parametrize("cell", EXACT_ROWS)
def test_exact_weights_are_the_same_to_the_last_bit(cell, size, results):
    (_, weights), (_, others) = (results(cell in LONG_CELLS, each)[cell] for each in (1, size))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)

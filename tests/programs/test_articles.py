"""The real files of examples/articles, run and read as a person would."""

import ast
import contextlib
import functools
import io
import json
import os
import re
import runpy
import sys
from types import SimpleNamespace
from unittest.mock import patch

import on_ranks
import pytest
import torch
import torchvision
from PIL import Image
from places import ARTICLES
from sklearn.datasets import load_digits

# Digits to train on. It is their number that takes time, however the steps share them.
FEW, ALL = 320, 1437


def digits_of(images):
    """Return so many digits to train on, and 360 to test on."""
    digits, count = load_digits(), images + 360
    return SimpleNamespace(images=digits.images[:count], target=digits.target[:count])


def run_example(name, *arguments, cache=None, images=ALL):
    """Run an example in this process, which has a group already, and return what it printed."""
    printed = io.StringIO()
    if cache:
        os.environ["PARDATA_CACHE"] = str(cache)  # until the ranks are given back
    sys.argv = [name, *map(str, arguments)]
    sys.path.insert(0, str(ARTICLES))
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        patch("example_data.load_digits", functools.partial(digits_of, images)),
    ):
        try:
            runpy.run_path(str(ARTICLES / name), run_name="__main__")
        except SystemExit as error:
            if error.code is not None:
                # What was printed is the result here too.
                error.code = f"{error.code} {printed.getvalue()}"
                raise
    return printed.getvalue()


def run(program, name, *arguments, size, **options):
    """Run an example on `size` ranks and return what each of them printed."""
    program = functools.partial(program, **options) if options else program
    return on_ranks.run(program, name, *arguments, world_size=size, timeout=300)


def run_offline(name, *arguments):
    """Run an example whose downloads fail."""

    def refuse(*_args, **_options):
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

    with patch.multiple(torchvision.datasets, MNIST=refuse, CIFAR10=refuse):
        try:
            return run_example(name, *arguments)
        except SystemExit as error:
            return error.code


def read_docstring(name):
    return ast.get_docstring(ast.parse((ARTICLES / name).read_text(encoding="utf-8"))) + "\n"


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir):
    return [row["train/loss"] for row in metrics(run_dir) if "train/loss" in row]


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        ("none", 1),
        ("dp", 1),
        ("ddp", 2),
        ("fsdp", 2),
    ],
)
def test_mnist_trains_under_every_strategy(strategy, size, tmp_path):
    shows = strategy == "dp"
    first, *others = run(
        run_example, "mnist.py", "--data", "digits", "--epochs", 1, "--strategy", strategy,
        "--run-dir", tmp_path, *["--show-shapes"] * shows, size=size,
    )  # fmt: skip
    assert f"world size {size}" in first
    assert "learning rate 0.002" in first
    assert re.search(r"step 20  loss \d\.\d+", first)
    assert re.search(r"epoch time .* s: .* s waiting for data, .* s computing", first)
    accuracy = re.search(r"test loss .*accuracy ([\d.]+) % \((\d+)/360 images\)", first)
    assert float(accuracy[1]) > 75
    assert len(re.findall(r"\d: [\d.]+ %", first)) == 10
    assert "total training time" in first
    for place in ("inside", "outside"):
        assert first.count(f"{place} the model: (64, 1, 28, 28) -> (64, 10)") == shows
    assert "epoch 1: 22/22" in first
    assert all("step" not in text for text in others)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.glob("events.out.tfevents.*"))
    assert metrics(tmp_path)[-1]["step"] == 22


DOUBLE = ("--data", "digits", "--epochs", 1, "--no-dropout", "--double", "--log-interval", 1)


@pytest.mark.parametrize("options", [(), ("--cache", "--augment")])
def test_mnist_without_dropout_has_the_same_losses_at_every_size(options, tmp_path):
    by_size = {}
    for size in (1, 3):
        run_dir = tmp_path / str(size)
        first, *_ = run(
            run_example, "mnist.py", *DOUBLE, *options, "--run-dir", run_dir, size=size,
            cache=tmp_path / "cache", images=FEW,
        )  # fmt: skip
        # The first run builds the files, and the next ones find them.
        assert ("caching Digits: " in first) is ("--cache" in options and size == 1)
        assert "/360 images)" in first
        by_size[size] = losses(run_dir)
    assert len(by_size[1]) == FEW // 64
    assert by_size[3] == pytest.approx(by_size[1], rel=1e-6)  # 1e-4 is promised


def test_cifar10_learns_the_digits_as_its_first_commands_start_it(tmp_path):
    commands = re.findall(
        r"examples/articles/cifar10\.py (--data digits)  ", read_docstring("cifar10.py")
    )
    assert commands == ["--data digits"] * 2  # with python and with torchrun
    printed, _ = run(
        run_example, "cifar10.py", *commands[0].split(), "--epochs", 2, "--run-dir", tmp_path,
        size=2,
    )  # fmt: skip
    assert "epoch 2/2  32 images a step, about 16 on each rank" in printed
    after_one, after_two = (row for row in metrics(tmp_path) if "test/loss" in row)
    assert after_two["test/loss"] < after_one["test/loss"]
    assert after_two["test/loss"] < 1.5  # ten classes drawn by lot: 2.3
    assert after_two["test/accuracy"] > 60
    assert losses(tmp_path)[-1] < 0.7 * losses(tmp_path)[0]


@pytest.mark.parametrize("name", ["mnist.py", "cifar10.py"])
@pytest.mark.parametrize("size", [1, 2])
def test_an_unreachable_download_ends_every_rank_and_names_the_digits(name, size, tmp_path):
    first, *others = run(run_offline, name, "--run-dir", tmp_path, size=size)
    assert first.startswith("1 ")  # the exit code
    assert "the data could not be downloaded (Error downloading train-images" in first
    assert "try --data digits, which need none" in first
    for text in others:  # the exit code, and one line
        assert re.fullmatch(r"1 \[1/2\] failed: SystemExit: 1 \(.*\)\n", text)


def test_cifar10_resumes_from_a_cache_on_fewer_processes(tmp_path):
    images, batch_size = FEW, 64
    program = functools.partial(run_example, cache=tmp_path / "cache", images=images)
    common = ("cifar10.py", "--data", "digits", "--model", "resnet18", "--cache")
    common += ("--batch-size", batch_size, "--run-dir", tmp_path)
    steps = images // batch_size
    first = run(program, *common, "--epochs", 1, size=2)[0]
    assert f"epoch 1/1  {batch_size} images a step, about {batch_size // 2} on each rank" in first
    assert re.search(r"accuracy [\d.]+ % \(\d+/360 images\)", first)
    bare = torchvision.models.resnet18(num_classes=10)
    bare.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True), strict=True)
    (second,) = run(program, *common, "--epochs", 2, size=1)
    assert f"restored step {steps}" in second
    assert "saved by 2 process(es) with torch" in second
    assert "epoch 2/2" in second
    assert "epoch 1/2" not in second
    assert re.search(
        r"step \d0  loss [\d.]+  accuracy [\d.]+  data [\d.]+ s  training [\d.]+ s", second
    )
    saved = [int(name.name[-2:]) for name in (tmp_path / "checkpoints").glob("attempt-*-step-*")]
    assert sorted(saved) == [steps, 2 * steps]


def test_cifar10_reads_a_folder_of_images(tmp_path):
    digits = load_digits()
    for index in range(100):
        part = "train" if index < 80 else "test"
        folder = tmp_path / part / str(digits.target[index])
        folder.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[index] * 15.9).astype("uint8")
        image = Image.fromarray(pixels).resize((32, 32)).convert("RGB")
        image.save(folder / f"{index}.png")
    printed = run(
        run_example, "cifar10.py", "--data", "folder", "--data-dir", tmp_path,
        "--model", "resnet18", "--batch-size", 32, "--epochs", 1, "--run-dir", tmp_path / "run",
        size=2,
    )[0]  # fmt: skip
    assert "/20 images)" in printed

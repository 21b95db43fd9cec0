"""The short examples, run as their first lines say: they learn, and keep the promise."""

import ast
import re
import textwrap
from pathlib import Path

import pytest
from forked import python
from places import EXAMPLES
from processes import run

soak = pytest.mark.soak
SHORT = {"mnist.py": 80, "cifar10.py": 102, "text.py": 120, "elastic.py": 130}
SHORT |= {"warm.py": 115, "survive.py": 120}


def printed_by(name, *arguments, size):
    """Run an example under torchrun; return what rank 0 printed of losses, accuracies, weights."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    text = run(python(), *launcher, EXAMPLES / name, *arguments, timeout=300)
    lines = re.findall(r"(?:epoch \d+: loss|step \d+:|epoch \d+: test|weights) .*", text)
    return [line.partition(", trained on")[0] for line in lines]


@pytest.mark.parametrize("name", SHORT)
def test_an_example_is_short_and_made_of_public_names(name):
    source = (EXAMPLES / name).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= SHORT[name]
    used = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert not any(module.startswith("pardata.") for module in used)


@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((1, 2, 3, 4), marks=soak)])
def test_mnist_prints_the_same_losses_on_any_number_of_processes(sizes):
    first, *others = [printed_by("mnist.py", "--data", "digits", size=size) for size in sizes]
    assert all(other == first for other in others)
    *epochs, weights = first
    assert len(epochs) == 5
    trained, tested = re.findall(r"([\d.]+)%", epochs[-1])
    assert min(float(trained), float(tested)) > 90
    assert re.fullmatch(r"weights [0-9a-f]{16}", weights)


@pytest.mark.parametrize(("epochs", "accuracy"), [(1, 60), pytest.param(4, 90, marks=soak)])
def test_cifar10_resumes_on_another_number_of_processes_and_learns(epochs, accuracy, tmp_path):
    data = ["--data", "digits", "--run-dir"]
    whole = printed_by("cifar10.py", *data, tmp_path / "whole", "--epochs", epochs, size=2)
    if epochs > 1:
        begun = printed_by("cifar10.py", *data, tmp_path / "moved", "--epochs", 1, size=2)
        ended = printed_by("cifar10.py", *data, tmp_path / "moved", "--epochs", epochs, size=3)
        assert begun[:-1] + ended == whole
    assert float(re.search(r"test accuracy ([\d.]+)", whole[-2])[1]) > accuracy
    assert (tmp_path / "whole" / "metrics.jsonl").read_text().count("test/accuracy") == epochs


@pytest.mark.parametrize(
    ("before", "after"),
    [(("ddp", 2), ("auto", 1)), pytest.param(("fsdp", 2), ("ddp", 3), marks=soak)],
)
def test_text_resumes_in_the_middle_of_an_epoch_under_another_strategy(before, after, tmp_path):
    # Short paragraphs, which take a fifth of the time: 15 steps an epoch.
    words = Path(textwrap.__file__).read_text().split()
    parts = [" ".join(words[start : start + 3]) for start in range(0, 3 * 480, 3)]
    (tmp_path / "text.txt").write_text("\n\n".join(parts))

    def steps_of(strategy, size, steps):
        own = ["--run-dir", tmp_path, "--steps", steps, "--strategy", strategy]
        own += ["--text", tmp_path / "text.txt"]
        return printed_by("text.py", *own, size=size)

    first, second = steps_of(*before, 10), steps_of(*after, 20)
    bits = [float(re.search(r"([\d.]+) bits", line)[1]) for line in (*first, *second)]
    assert [line.partition(":")[0] for line in (*first, *second)] == ["step 10", "step 20"]
    assert bits[1] < bits[0] < 8  # bits of a byte

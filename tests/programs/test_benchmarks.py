"""The benchmarks' real files, at their smallest. How long anything takes is not looked at."""

import contextlib
import json
import math
import os
import re
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from PIL import Image
from places import BENCHMARKS, SHARED_DATA
from scripts import printed_by

sys.path.insert(0, str(BENCHMARKS))

needs_mnist = pytest.mark.skipif(
    not (SHARED_DATA / "MNIST" / "raw").is_dir(), reason=f"MNIST is not in {SHARED_DATA}"
)
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from Linux's /proc"
)

from _measure import Row, alternate, table  # noqa: E402  # path first
from _targets import Target  # noqa: E402  # likewise


def output_of(folder, name, *arguments, **env):
    """Run a benchmark that saves in `folder`; return what it printed."""
    with patch.dict(os.environ, env), contextlib.chdir(folder):
        return printed_by(BENCHMARKS / name, *arguments, "--save", folder)


def table_rows(text):
    """Return the cells of every row of the Markdown tables in `text`, headers left out."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return [row for row in cells if len(row) == 7 and "target" not in row]


def contenders(text):
    return [row[0] for row in table_rows(text)]


def verdicts(text):
    """Return the contenders that have a target, each with it."""
    judged = [row for row in table_rows(text) if row[5]]
    assert all(re.match("met|missed|not measured$", row[6]) for row in judged)
    return {(row[0], row[2], row[5]) for row in judged}


def saved(directory, name):
    return json.loads((directory / f"{name}.json").read_text())


def test_step_overhead_compares_with_ddp_and_ends_with_equal_parameters(tmp_path):
    text = output_of(tmp_path, "step_overhead.py", "--rounds", 1, "--steps", 2, "--nets", "mlp")
    ours, ddp = 'wrap_model(..., "ddp")', "DistributedDataParallel"
    assert verdicts(text) == {
        (ours, ddp, "≤ 1.02"),
        ('wrap_model(..., "none")', "bare module", "≤ 1.02"),
        ('wrap_model(..., "auto")', "bare module", "≤ 1.02"),
    }
    assert contenders(text).count("DDP again") == 1
    same = "parameters of all contenders: equal to the bit, on every rank"
    assert text.count(same) == 2  # in two processes and in one
    tables = saved(tmp_path, "step_overhead")["tables"]
    assert [len(row["values"]) for rows in tables.values() for row in rows] == [1] * 9
    assert "cores: " in text.splitlines()[0]


def test_training_loop_compares_the_readme_with_loops_by_hand(tmp_path):
    text = output_of(tmp_path, "training_loop.py", "--rounds", 1, "--steps", 2, "--nets", "mlp")
    ours = "README's loop", "README's loop, Microbatches"
    targets = ("plain loop", "≤ 1.15"), ("DDP, loss reduced", "≤ 1.05")
    assert verdicts(text) == {(name, *target) for name in ours for target in targets}
    assert "README's loop, exact" in contenders(text)
    assert contenders(text).count("DDP again") == contenders(text).count("plain loop again") == 1


def test_scale_prints_what_each_operation_costs_by_the_number_of_ranks(tmp_path):
    text = output_of(tmp_path, "scale.py", "--rounds", 1, "--sizes", 2, 3, "--save", tmp_path)
    costs = saved(tmp_path, "scale")["costs"]
    assert [list(costs[name]) for name in costs] == [["2", "3"]] * 10
    for name, (two, three) in ((name, by_size.values()) for name, by_size in costs.items()):
        assert f"| {name} |" in text
        assert min(*two, *three) > 0
        assert three[1] <= two[1] + 16, name  # requests of one rank: they do not grow


def test_metrics_compares_with_bare_all_reduce_calls_and_checks_means(tmp_path):
    text = output_of(tmp_path, "metrics.py", "--rounds", 1)
    bare, each = "one bare all_reduce of ten floats", "one all_reduce for each metric"
    floats, tensors = "all_reduce_mean of ten floats", "all_reduce_mean of ten tensors"
    assert verdicts(text) == {
        (floats, bare, "≤ 1.5"),
        (tensors, bare, "≤ 1.5"),
        (each, floats, "≥ 4"),
        (each, tensors, "≥ 4"),
    }
    assert "means of all contenders: equal to the bit, on both ranks" in text
    together, alone = saved(tmp_path, "metrics")["tables"].values()
    assert [row["name"] for row in together] == [bare, floats, tensors, each, each]
    assert [row["name"] for row in alone] == [floats, tensors]


def test_import_time_says_what_is_loaded_and_where_the_time_goes(tmp_path):
    text = output_of(tmp_path, "import_time.py", "--rounds", 1, "--breakdown")
    assert verdicts(text) == {("torch, then pardata", "", "≤ 30")}
    assert re.search(r"modules loaded after torch: \d+ of pardata, \d+ others; none of torch", text)
    assert re.search(r"\| [\d,]+ \| [\d,]+ \| pardata \|", text)
    (rows,) = saved(tmp_path, "import_time")["tables"].values()
    assert [len(row["values"]) for row in rows] == [2, 1, 1]


@needs_proc
def test_shuffle_measures_and_draws_both_samplers_at_each_length(tmp_path):
    text = output_of(
        tmp_path, "shuffle.py", "--rounds", 1, "--powers", 3, 5, 9, "--sampler-up-to", 5,
        "--batches", 8,
    )  # fmt: skip
    ours = [f"make_loader, N = 10^{power}" for power in (3, 5, 9)]
    theirs = [f"DistributedSampler, N = 10^{power}" for power in (3, 5)]
    assert contenders(text) == (ours + theirs) * 3
    assert verdicts(text) == {(name, "", f"≤ {limit}") for name in ours for limit in (100, 50, 2)}
    _, memory, _ = saved(tmp_path, "shuffle")["tables"].values()
    megabytes = {row["name"]: row["values"][0] for row in memory}
    # Sizes and not times: 8 bytes a sample would be 8,000 of them.
    assert megabytes[ours[2]] < 2 * megabytes[ours[0]]
    assert is_picture(tmp_path / "shuffle.png")
    assert len(list(tmp_path.iterdir())) == 2


def left_in(directory):
    # PyTorch's compiler makes a folder of its own when it is imported.
    names = [path.name for path in Path(directory).iterdir()]
    return [name for name in names if not name.startswith("torchinductor_")]


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


PER_SAMPLE = [
    (f"pardata, {workers} workers{option}", f"DataLoader, {workers} workers", f"≥ {least}")
    for least in (0.85, 0.97)
    for workers in (0, 2)
    for option in ("", ", reproducible=False")
]


def cached_verdicts(over_data_loader, over_limit):
    name = "pardata, cached, batch_transform"
    return [
        (name, "DataLoader, 0 workers", f"≥ {over_data_loader}"),
        (name, "limit: index_select and arithmetic", f"≥ {over_limit}"),
    ]


@needs_mnist
def test_loading_compares_with_data_loader_and_the_limit_whatever_else_is_installed(
    tmp_path, short_tmp
):
    images = tmp_path / "images"
    for name in ("cat", "dog"):
        (images / "train" / name).mkdir(parents=True)
        for index in range(128):
            shade = Image.new("RGB", (32, 32), (index, 2 * index, 255 - index))
            shade.save(images / "train" / name / f"{index}.jpg")
    text = output_of(
        tmp_path, "loading.py", "--rounds", 1, "--batches", 1, "--more", 1, "--samples", 256,
        "--tables", "mnist", "cifar", "--data-dir", SHARED_DATA, "--cifar-dir", images,
        TMPDIR=short_tmp,
    )  # fmt: skip
    assert verdicts(text) == {*PER_SAMPLE}.union(
        cached_verdicts(100, 0.6), cached_verdicts(25, 0.95)
    )
    for library in ("StatefulDataLoader", "Accelerate", "Fabric"):
        takes_part = f"{library}, 0 workers" in contenders(text)
        assert takes_part != (f"{library} takes no part: " in text)
    same = "batches of all loaders: of the same form; cached images: the same"
    assert text.count(same) == len(saved(tmp_path, "loading")["tables"]) == 2
    assert left_in(short_tmp) == []


def test_loading_leaves_out_what_is_not_there_and_says_so(tmp_path):
    text = output_of(tmp_path, "loading.py", "--data-dir", tmp_path, "--cifar-dir", tmp_path)
    assert f"MNIST: left out without {tmp_path / 'MNIST' / 'raw'}; see --data-dir" in text
    assert f"left out without {tmp_path / 'train'}; see --cifar-dir" in text
    assert table_rows(text) == []
    assert not any(tmp_path.iterdir())


@needs_mnist
def test_epoch_compares_with_the_tutorial_and_with_batches_that_are_ready(tmp_path, short_tmp):
    text = output_of(
        tmp_path, "epoch.py", "--rounds", 1, "--sizes", 2, "--samples", 64, "--batch-size", 32,
        "--data-dir", SHARED_DATA,
        TMPDIR=short_tmp, PARDATA_TUNE_CPU="0",  # what is compared is its own
    )  # fmt: skip
    cached, limit, tutorial = "pardata, cached", "limit: all ready", "the tutorial"
    assert verdicts(text) == {
        (f"{cached}, tune_cpu=True", tutorial, "≤ 0.65"),
        (f"{cached}, tune_cpu=True", f"{limit}, tune_cpu=True", "≤ 1.05"),
        (f"{cached}, tune_cpu=False", f"{limit}, tune_cpu=False", "≤ 1.05"),
    }
    assert "losses of the cached loader and its limit at size 2: equal to the bit" in text
    assert len(saved(tmp_path, "epoch")["tables"]) == 1


def test_exact_compares_time_and_memory_with_ddp(tmp_path):
    text = output_of(tmp_path, "exact.py", "--rounds", 1, "--nets", "convnet, 4")
    assert verdicts(text) == {
        ("s a step, exact", "ddp", "≤ 1.05"),
        ("exact", "", "≤ 12"),
    }
    assert contenders(text) == [
        *(f"{quantity} a step, {who}" for quantity in ("s", "CPU s") for who in ("ddp", "exact")),
        *("ddp", "exact", "ddp", "exact"),
    ]
    (ddp, *_), *memory = saved(tmp_path, "exact")["tables"].values()
    assert len(ddp["values"]) == 1
    # Sizes and not times: a gradient for each level of the tree, and that which is sent.
    ((_, exact), (_, with_four)) = memory
    assert 4 < exact["values"][0] < 10
    assert 8 < with_four["values"][0] < 15


@pytest.mark.soak
def test_gpu_reports_a_dry_run_on_a_cpu(tmp_path, short_tmp):
    text = output_of(
        tmp_path, "gpu.py", "--device", "cpu", "--rounds", 1,
        "--data-dir", tmp_path / "none", "--cifar-dir", tmp_path / "none", TMPDIR=short_tmp,
    )  # fmt: skip
    assert "device: CPU: a dry run" in text
    assert text.count("these images are made up") == 2
    assert table_rows(text)
    assert verdicts(text) == set()
    assert [title[1] for title in saved(tmp_path, "gpu")["tables"]] == ["a", "b", "b"]


def test_gpu_first_day_goes_through_every_check_on_a_cpu(tmp_path):
    text = output_of(tmp_path, "gpu_first_day.py", "--device", "cpu")
    assert "device: cpu: a dry run" in text
    findings = saved(tmp_path, "gpu_first_day")["tables"]["checks"]
    assert text.count("\n| ") == len(findings) + 2
    found = {(row["check"], row["what"]): row["found"] for row in findings}
    codes = {check: text for (check, what), text in found.items() if what == "seconds, exit code"}
    assert [*codes] == [
        *("meshes", "ends", "environment", "probe", "operations", "graphs", "lstm"),
        *("exact", "two_ranks", "seeding", "prefetch", "saves"),
    ]
    assert all(text.endswith(", 0") for text in codes.values()), codes
    operations = [text for (check, _), text in found.items() if check == "operations"]
    assert sum(text.startswith("equal") for text in operations) > 20
    assert not any("DIFFERS" in text for text in operations)
    ends = [text for (check, _), text in found.items() if check == "ends"]
    assert ends[:3] == ["[1, 1], [True, True]"] * 3


def test_a_check_that_fails_costs_only_itself(tmp_path):
    output_of(tmp_path, "gpu_first_day.py", "--checks", "seeding", "saves", "--device", "meta")
    findings = saved(tmp_path, "gpu_first_day")["tables"]["checks"]
    assert [row["found"].endswith(", 1") for row in findings] == [True, True]


def test_drift_finds_ddp_apart_and_exact_the_same(tmp_path):
    text = output_of(tmp_path, "drift.py", "--sizes", 1, 2, "--epochs", 1)
    ddp, exact = saved(tmp_path, "drift")["tables"].values()
    assert [row["values"][0] == 0 for row in ddp] == [True, True, False, False]
    assert all(row["values"] == [0] for row in exact)
    assert "2 process(es)" in text
    assert is_picture(tmp_path / "drift.png")


def run_here(monkeypatch, name, *arguments):
    """Run a benchmark that stops before it starts processes: this one has torch already."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    return stopped.value.code


@pytest.mark.parametrize("name", [path.name for path in BENCHMARKS.glob("[!_]*.py")])
def test_help_and_the_readme_say_the_command(name, monkeypatch, capsys):
    assert run_here(monkeypatch, name, "--help") == 0
    text = capsys.readouterr().out
    assert f"    python benchmarks/{name}\n" in text
    assert "--rounds" in text
    assert "--save" in text
    readme = (BENCHMARKS / "README.md").read_text()
    assert f"`python benchmarks/{name}`" in readme
    assert f"[{name}]({name})" in readme


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("shuffle.py", ["--powers", "2"], "--powers must be 3 or more, for a batch of 256"),
        ("metrics.py", ["--rounds", "0"], "must be 1 or more, but is 0"),
    ],
)
def test_too_little_is_refused(name, arguments, text, monkeypatch, capsys):
    assert run_here(monkeypatch, name, *arguments) == 2
    assert text in capsys.readouterr().err


def test_contenders_take_turns_in_an_order_that_changes():
    called = []
    measured = alternate({name: lambda n=name: called.append(n) or n for name in "abc"}, rounds=6)
    assert measured == {name: [name] * 6 for name in "abc"}
    rounds = ["".join(called[start : start + 3]) for start in range(0, 18, 3)]
    assert rounds == ["abc", "cba", "bca", "acb", "cab", "bac"]


def test_the_ratio_is_the_median_of_the_ratios_within_a_round():
    # The second round was slow for both: the ratio of the medians would be 2.
    row = Row.compare({"ours": [1, 20, 3], "theirs": [1, 10, 1]}, "ours", "theirs", "a sample, us")
    title, header, rule, cells = filter(None, table("A title", "us", [row]).splitlines())
    assert title == "A title"
    assert re.sub(" +", " ", header) == "| | us | over | ratio | ± | target | |"
    assert set(rule) == set("|-:")
    expected = "| ours | 3 | theirs | 2.000 | 0.91 | ≤ 2 | met, within the noise |"
    assert re.sub(" +", " ", cells) == expected


@pytest.mark.parametrize(
    ("target", "value", "text"),
    [
        (Target(1.02), 1.02, "met, within the noise"),
        (Target(1.02), 1.0201, "missed"),
        (Target(4, at_least=True), 4.1, "met"),
        (Target(0), math.nan, "not measured"),
    ],
)
def test_a_verdict_knows_on_which_side_good_is(target, value, text):
    assert target.verdict(value, noise=0) == text

"""Write the figures of the pages from results/*.json: all of them, or compare them with --check.

    python benchmarks/_figures.py
    python benchmarks/_figures.py --check

The page figures.md has the tables of the results. A page of the documentation names a figure in
a comment, and the figure is between that comment and the next empty one.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from _measure import RESULTS, Row, noise, table
from _targets import TARGETS

ROOT = Path(__file__).parents[1]
FIGURES_PAGE = ROOT / "benchmarks" / "figures.md"
HEAD = """# Figures

`python benchmarks/_figures.py` writes this page from the files in [results](results). [How to read
a table](README.md#how-to-read-a-table) explains the columns. Of gpu_first_day.json it has the tests
and the figures with a target; the file has all checks."""
# In a page: the name of a figure, the figure, and where it ends.
MARK = re.compile(r"<!--([a-z][\w-]*)-->(.*?)<!---->", re.DOTALL)

MLP, MLP_ALONE = "Step of MLP 64-64-10: 2 processes", "Step of MLP 64-64-10: 1 process"
NET = "Step of net of examples/articles/mnist.py without dropout: 2 processes"
LOOP, EXACT, REDUCED = "README's loop", "README's loop, exact", "DDP, loss reduced"
DATA_LOADER, CACHED = "DataLoader, 0 workers", "pardata, cached, batch_transform"
PLAIN = "pardata, 0 workers"
SAVE, IN_CALL = "Checkpointer", "resnet50 with Adam, 283 MB: s in the call"
IN_ALL = "resnet50 with Adam, 283 MB: s to the end"
SCALE = {"barrier, s": "barrier", "wrap_model, s": "wrap_model"}
GROWTH, GPU_EXACT = "growth with the ranks, exponent", "exact, one GPU"
GPU_STEPS = "benchmarks/gpu.py --parts c d e --rounds 1"
GPU_LOOP = "(c) the README's loop over DDP by hand: small MLP, ResNet-18, transformer"
GPU_LOOP_TARGET, GPU_NETS = "README's loop, one GPU", ("small MLP", "ResNet-18", "transformer")
TARGETS_OF_TABLES = (*SCALE, GROWTH, GPU_LOOP_TARGET, GPU_EXACT)  # all others: of rows
GPU_NET = "(b) ResNet-50, bf16: CIFAR-10 as JPEG, with random crop and flip, batch 512, images/s"
GPU_READY = "limit: all batches on the GPU"
GPU_DAYS = {
    "h100-1": (),
    "h200": ("after the mends, one H200, same software",),
    "h100-2": ("2026-11-27, one H100, same software, with the redesign of process groups",),
}


def result(script: str) -> Any:
    """Return the content of the JSON file of a benchmark."""
    return json.loads((RESULTS / f"{script}.json").read_text(encoding="utf-8"))


def row(script: str, title: str, name: str, over: str = "") -> Row:
    """Return the row of a contender in the only table whose title begins with `title`."""
    (rows,) = (rows for found, rows in result(script)["tables"].items() if found.startswith(title))
    (found,) = (one for one in rows if (one["name"], one["over"]) == (name, over))
    return Row(**found)


def rounded(*numbers: float) -> str:
    """Return a number, and how far chance may have moved it, with the decimals of the number."""
    decimals = sum(abs(numbers[0]) < limit for limit in (10, 100))
    return " ± ".join(f"{number:,.{decimals}f}" for number in numbers)


def ratio(script: str, title: str, name: str, over: str) -> str:
    """Return the ratio of two contenders."""
    ratios = row(script, title, name, over).ratios
    return rounded(median(ratios), noise(ratios))


def value(script: str, title: str, name: str, factor: float = 1) -> str:
    """Return the median of what a contender measured."""
    found = median(row(script, title, name).values) * factor
    return f"{found:,.0f}" if found >= 100 else f"{found:.3g}"


def on_gpu(day: str, *path: str | int) -> Any:
    """Return what was measured on a day with a GPU."""
    found = result("gpu_first_day")
    for step in (*GPU_DAYS[day], *path):
        found = found[step]
    return found


def verdict(target: str, value: float, spread: float = 0) -> str:
    """Return whether a figure meets its target."""
    return TARGETS[target].verdict(value, spread)


def gpu_loop(index: int) -> list[float]:
    """Return the ratio of the README's loop to hand-written DDP for a net, and its noise."""
    return [*map(float, on_gpu("h100-2", GPU_STEPS, GPU_LOOP, index).split(" +- "))]


def gpu_tests(day: str) -> str:
    """Return how many tests passed and failed."""
    found = on_gpu(day, "pytest -m gpu")
    return f"{found['passed']} passed, {found['failed']} failed"


def gpu_exact() -> list[float]:
    """Return the two ratios of "exact" to "ddp", of one round each."""
    title = "(d) ResNet-18 in microbatches, a step, ms"
    first = on_gpu("h100-1", GPU_STEPS, title, 2, 3)
    again = on_gpu("h100-2", GPU_STEPS, "(d) exact over ddp, ResNet-18 in microbatches")
    return sorted([float(first), float(again.split(" ")[0])])


def machine(script: str) -> str:
    """Return where and when a script ran."""
    about = result(script)["environment"]
    return f"{about['cores']} cores ({about['CPU']}), torch {about['torch']}, {about['date']}"


FIGURES: dict[str, Callable[[], str]] = {
    "machine": lambda: f"{machine('training_loop')}, commit {commit()}",
    "wrap": lambda: ratio(
        "step_overhead", MLP, 'wrap_model(..., "ddp")', "DistributedDataParallel"
    ),
    "mlp-ms": lambda: value("training_loop", MLP, "DDP", 1e-3),
    "net-ms": lambda: value("training_loop", NET, "DDP", 1e-3),
    "mlp": lambda: ratio("training_loop", MLP, LOOP, "DDP"),
    "net": lambda: ratio("training_loop", NET, LOOP, "DDP"),
    "mlp-reduced": lambda: ratio("training_loop", MLP, LOOP, REDUCED),
    "net-reduced": lambda: ratio("training_loop", NET, LOOP, REDUCED),
    "mlp-alone": lambda: ratio("training_loop", MLP_ALONE, LOOP, "plain loop"),
    "mlp-exact": lambda: ratio("training_loop", MLP, EXACT, "DDP"),
    "exact-net": lambda: ratio("exact", "convnet, 2", "s a step, exact", "ddp"),
    "exact-net-4": lambda: ratio("exact", "convnet, 4", "s a step, exact", "ddp"),
    "exact-resnet": lambda: ratio("exact", "resnet18, 2", "s a step, exact", "ddp"),
    "exact-resnet-4": lambda: ratio("exact", "resnet18, 4", "s a step, exact", "ddp"),
    "exact-perceptron": lambda: ratio("exact", "perceptron", "s a step, exact", "ddp"),
    "metrics": lambda: ratio(
        "metrics",
        "Mean of ten metrics: 2",
        "all_reduce_mean of ten floats",
        "one bare all_reduce of ten floats",
    ),
    "metrics-each": lambda: ratio(
        "metrics",
        "Mean of ten metrics: 2",
        "one all_reduce for each metric",
        "all_reduce_mean of ten floats",
    ),
    "cached-mnist": lambda: ratio("loading", "MNIST: ", CACHED, DATA_LOADER),
    "cached-cifar": lambda: ratio("loading", "CIFAR", CACHED, DATA_LOADER),
    "plain-mnist": lambda: ratio("loading", "MNIST: ", PLAIN, DATA_LOADER),
    "fast-mnist": lambda: ratio("loading", "MNIST: ", f"{PLAIN}, reproducible=False", DATA_LOADER),
    "first-ms": lambda: value("shuffle", "ms to the first", "make_loader, N = 10^9"),
    "first-mb": lambda: value("shuffle", "MB to the first", "make_loader, N = 10^9"),
    "sampler-s": lambda: value("shuffle", "ms to the first", "DistributedSampler, N = 10^8", 1e-3),
    "sampler-mb": lambda: value("shuffle", "MB to the first", "DistributedSampler, N = 10^8"),
    "epoch-1": lambda: epoch(1, "pardata, cached, tune_cpu=True", "the tutorial"),
    "epoch-2": lambda: epoch(2, "pardata, cached, tune_cpu=True", "the tutorial"),
    "epoch-untuned": lambda: epoch(1, "pardata, cached, tune_cpu=False", "the tutorial"),
    "copy-ms": lambda: value("checkpoint", IN_CALL, "copy", 1e3),
    "async-ms": lambda: value("checkpoint", IN_CALL, f"{SAVE}, asynchronous", 1e3),
    "async-end-ms": lambda: value("checkpoint", IN_ALL, f"{SAVE}, asynchronous", 1e3),
    "save-ms": lambda: value("checkpoint", IN_CALL, SAVE, 1e3),
    "async": lambda: ratio("checkpoint", IN_CALL, f"{SAVE}, asynchronous", "copy"),
    "save": lambda: ratio("checkpoint", IN_CALL, SAVE, "torch.save"),
    "save-synced": lambda: ratio("checkpoint", IN_CALL, SAVE, "torch.save, synced"),
    "cost": lambda: ratio("balance", "ddp", "with `cost`", "limit"),
    "no-cost": lambda: ratio("balance", "ddp", "without", "limit"),
    "cost-exact": lambda: ratio("balance", "exact", "with `cost`", "limit"),
    "no-cost-exact": lambda: ratio("balance", "exact", "without", "limit"),
    "gpu-mlp": lambda: rounded(*gpu_loop(0)),
    "gpu-resnet": lambda: rounded(*gpu_loop(1)),
    "gpu-transformer": lambda: rounded(*gpu_loop(2)),
    "gpu-mlp-verdict": lambda: verdict(GPU_LOOP_TARGET, *gpu_loop(0)),
    "gpu-resnet-verdict": lambda: verdict(GPU_LOOP_TARGET, *gpu_loop(1)),
    "gpu-transformer-verdict": lambda: verdict(GPU_LOOP_TARGET, *gpu_loop(2)),
    "gpu-exact": lambda: " and ".join(map(rounded, gpu_exact())),
    "gpu-exact-verdict": lambda: " and ".join(verdict(GPU_EXACT, one) for one in gpu_exact()),
    "gpu-mlp-pair": lambda: gpu_pair("MLP"),
    "gpu-resnet-pair": lambda: gpu_pair("ResNet-18"),
    "gpu-lenet-s": lambda: value("gpu", "(a)", f"{CACHED}, in all"),
    "gpu-lenet-4": lambda: f"{lenet(CACHED) / lenet('DataLoader, 4 workers'):.2f}",
    "gpu-lenet-verdict": lambda: row("gpu", "(a)", f"{CACHED}, in all").cells()[-1],
    "gpu-ready-verdict": lambda: row("gpu", GPU_NET, CACHED, GPU_READY).cells()[-1],
    "gpu-images": lambda: ratio("gpu", GPU_NET, CACHED, "DDP by hand, DataLoader, 8 workers"),
    "gpu-ready": lambda: ratio("gpu", GPU_NET, CACHED, GPU_READY),
    "gpu-tests-1": lambda: gpu_tests("h100-1"),
    "gpu-tests-h200": lambda: gpu_tests("h200"),
    "gpu-tests-2": lambda: gpu_tests("h100-2"),
}


def commit() -> str:
    """Return the commit of the results of CPUs; raise if they are of several."""
    scripts = [path.stem for path in RESULTS.glob("*.json") if not path.stem.startswith("gpu")]
    commits = {result(script)["environment"]["commit"] for script in scripts}
    if len(commits) != 1:
        raise ValueError(f"the results must be of one commit, but are of {sorted(commits)}")
    return str(commits.pop())


def epoch(size: int, name: str, over: str) -> str:
    """Return the ratio of two epochs on a number of processes."""
    titles = [title for title in result("epoch")["tables"] if f": {size} process(es)" in title]
    return ratio("epoch", titles[0], name, over)


def lenet(name: str) -> float:
    """Return the seconds of ten epochs of LeNet on a GPU."""
    return median(row("gpu", "(a)", name, "" if name == DATA_LOADER else DATA_LOADER).values)


def gpu_pair(net: str) -> str:
    """Return a ratio on one GPU with the work of a group of two ranks."""
    found = on_gpu("h100-2", "the README's loop as with two ranks, over DDP by hand", net)
    return rounded(found)


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page with figures, and what it must hold."""
    yield FIGURES_PAGE, figures_page()
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]:
        yield page, quoted(page.read_text(encoding="utf-8"))


def quoted(text: str) -> str:
    """Return a page with each marked figure as the results have it."""
    return MARK.sub(lambda mark: f"<!--{mark[1]}-->{FIGURES[mark[1]]()}<!---->", text)


def figures_page() -> str:
    """Return the page with every table of every result."""
    parts = [HEAD]
    for path in sorted(RESULTS.glob("*.json")):
        found = result(path.stem)
        about = "; ".join(": ".join(item) for item in found["environment"].items())
        parts += [f"## {path.stem}.py", about, *tables(path.stem, found)]
    return "\n\n".join(parts) + "\n"


def tables(script: str, found: Any) -> Iterator[str]:
    """Yield the tables of a result."""
    if script == "scale":
        yield from scale_tables(found["costs"])
    elif script == "gpu_first_day":
        yield from gpu_tables()
    else:
        for title, rows in found["tables"].items():
            yield table(title, found["units"][title], [Row(**one) for one in rows])


def scale_tables(costs: Any) -> Iterator[str]:
    """Yield what operations cost by the number of ranks, with the targets."""
    from scale import exponent, growth  # noqa: PLC0415  # imports torch

    yield growth(costs)
    for name, operation in SCALE.items():
        ranks, (seconds, *_) = next(reversed(costs[operation].items()))
        judged = f"{TARGETS[name]} s, {verdict(name, seconds)}"
        yield f"{operation} of {ranks} ranks: {seconds:.2f} s; target {judged}"
    sizes = list(map(int, costs["barrier"]))
    _by_hand, *ours = ([cost[0] for cost in by_size.values()] for by_size in costs.values())
    largest = max(exponent(sizes, seconds) for seconds in ours)
    judged = f"{TARGETS[GROWTH]}, {verdict(GROWTH, largest)}"
    yield f"largest exponent, except by hand: {largest:.2f}; target {judged}"


def gpu_tables() -> Iterator[str]:
    """Yield what was measured in three sessions on a GPU, with the targets."""
    days = "one H100, 26 November", "one H200, 26 November", "one H100, 27 November"
    tests = map(gpu_tests, GPU_DAYS)
    yield plain_table("`pytest -m gpu`", *zip(days, tests, strict=True))
    yield plain_table(
        f"The README's loop over hand-written DDP, one H100; target {TARGETS[GPU_LOOP_TARGET]}",
        *((net, judged_loop(index)) for index, net in enumerate(GPU_NETS)),
        *((f"{net}, for two ranks", gpu_pair(net)) for net in ("MLP", "ResNet-18")),
    )
    yield plain_table(
        f'"exact" over "ddp", one H100, two sessions; target {TARGETS[GPU_EXACT]}',
        *(("ResNet-18", f"{rounded(one)}, {verdict(GPU_EXACT, one)}") for one in gpu_exact()),
    )


def judged_loop(index: int) -> str:
    """Return a ratio of the README's loop on a GPU, with its verdict."""
    return f"{rounded(*gpu_loop(index))}, {verdict(GPU_LOOP_TARGET, *gpu_loop(index))}"


def plain_table(title: str, *rows: tuple[str, str]) -> str:
    """Return rows of two cells as a Markdown table below a title."""
    lines = (f"| {name} | {found} |" for name, found in rows)
    return "\n".join([title, "", "| | |", "| --- | --- |", *lines])


def main() -> None:
    """Write the pages, or say which differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if they differ")
    args = parser.parse_args()
    old = [page for page, text in pages() if not page.exists() or page.read_text("utf-8") != text]
    if args.check:
        sys.exit("\n".join(f"{page.relative_to(ROOT)} is not as the results" for page in old) or 0)
    for page, text in pages():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

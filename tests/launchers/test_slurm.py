"""SLURM: tasks are ranks, a batch script's own process is alone, a preempted run goes on."""

import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from cluster import cluster
from namespaces import require_namespaces
from packages import require
from PIL import Image
from places import EXAMPLES
from processes import wait_for
from programs import MNIST, TORCHRUN, WHO, fingerprint, joined

from pardata import Checkpointer

PYTHON = sys.executable
STOPPING = Path(__file__).parents[1] / "helpers" / "stopping.py"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    require_namespaces()
    require(["slurmctld", "slurmd", "srun", "munged"], ["slurm-wlm", "munge"])
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(params=[4, pytest.param(16, marks=pytest.mark.soak)])
def few_images(tmp_path, request):
    """What `cifar10.py` is to read: ten steps of noise, for ResNet is slow on a CPU."""
    noise, batch_size = random.Random(0), request.param
    for part, count in (("train", 10 * batch_size), ("test", batch_size)):
        for index in range(count):
            file = tmp_path / part / f"class{index % 2}" / f"{index}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.frombytes("RGB", (32, 32), noise.randbytes(32 * 32 * 3)).save(file)
    return [
        "--data", "folder", "--data-dir", tmp_path, "--batch-size", batch_size,
        "--model", "resnet18", "--num-workers", 0,
    ]  # fmt: skip


@pytest.fixture
def submit(slurm, folder):
    """Submit an example's batch script, in the checkout as its user does; return the job."""

    def submit(script, *arguments, options=()):
        sbatch = ["sbatch", "--parsable", f"--output={folder / 'out'}", *options]
        root = EXAMPLES.parent
        return slurm.run(
            *sbatch, f"--chdir={root}", EXAMPLES / "slurm" / script, *arguments
        ).strip()

    return submit


# By launcher: its batch script, and options that stand before those in the script.
SCRIPTS = {
    "slurm": ("srun.sbatch", ["--wait", "--ntasks-per-node=1"]),
    "torchrun": ("torchrun.sbatch", ["--wait"]),
}


@pytest.mark.parametrize(("launcher", "size"), [("slurm", 2), ("torchrun", 4)])
def test_a_batch_script_on_two_nodes_trains_as_one_process(launcher, size, submit, alone, folder):
    script, options = SCRIPTS[launcher]
    submit(script, *MNIST[1:], "--run-dir", folder / "run", options=options)
    printed = (folder / "out").read_text()
    assert joined(printed) == f"world size {size}, nodes 2, launcher {launcher}"
    assert fingerprint(printed) == alone


def test_ranks_that_slurm_spreads_unevenly_know_their_place(slurm):
    # Without --ntasks-per-node it fills the first node.
    printed = slurm.run("srun", "-N", 2, "-n", 4, PYTHON, WHO)
    assert sorted(re.findall(r"rank .*", printed)) == [
        "rank 0/4 local 0/3 node 0/2 slurm sum 10",
        "rank 1/4 local 1/3 node 0/2 slurm sum 10",
        "rank 2/4 local 2/3 node 0/2 slurm sum 10",
        "rank 3/4 local 0/1 node 1/2 slurm sum 10",
    ]


def test_the_doctor_checks_all_tasks_and_prints_once(slurm):
    printed = slurm.run("srun", "-N", 2, "-n", 4, PYTHON, "-m", "pardata", "check")
    assert printed.count("4 ranks met, backend gloo") == 1
    rows = re.findall(r"rank (\d+) +\S+, node (\d+), local rank (\d+), cpu", printed)
    assert [tuple(map(int, row)) for row in rows] == [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 1, 0)]


def test_a_plain_python_in_an_allocation_is_a_single_process(slurm, folder):
    single = "rank 0/1 local 0/1 node 0/1 single sum 1\n"
    assert single in slurm.run("salloc", "-n", 2, PYTHON, WHO)
    script = ["--wait", f"--output={folder / 'out'}", "--wrap", f"{PYTHON} {WHO}"]
    slurm.run("sbatch", "-N", 2, "-n", 4, *script)
    assert single in (folder / "out").read_text()


SIGNALS = "--signals-to-handle=SIGTERM,SIGUSR2"
STARTERS = {
    "srun": ["-n", 2, PYTHON],
    "torchrun": ["-n", 1, *TORCHRUN, "--standalone", "--nproc-per-node=2", SIGNALS],
}


@pytest.fixture
def reading(slurm, folder):
    """Start a run of two ranks with workers; return its job as soon as they read."""
    out = folder / "out"

    def start(launcher):
        own = ["srun", *STARTERS[launcher], STOPPING, "fork", 1, folder / "run"]
        script = " ".join(map(str, own))
        job = slurm.run("sbatch", "--parsable", "-n2", f"--output={out}", "--wrap", script).strip()
        wait_for(lambda: out.exists() and out.read_text().count("reads") == 2)
        return job

    return start


def check_saved(folder):
    """Wait for both ranks, which must stop at one step and have saved it."""
    printed = (folder / "out").read_text
    wait_for(lambda: printed().count("ended well") == 2, 90, printed)
    (step,) = set(re.findall(r"stopped after (\d+)\n", printed()))
    assert Checkpointer(folder / "run").steps()[-1] == int(step)


LIMIT = ["scontrol", "update", "EndTime=now+1", "jobid={job}"]  # SLURM looks each half minute
ENDINGS = {
    "cancelled": ("srun", ["scancel", "{job}"]),
    "limit": ("srun", LIMIT),
    "torchrun": ("torchrun", ["scancel", "--signal=TERM", "{job}"]),
}


@pytest.mark.parametrize(
    "ending", ["cancelled", "torchrun", pytest.param("limit", marks=pytest.mark.soak)]
)
def test_a_run_saves_however_slurm_ends_it(slurm, reading, folder, ending):
    launcher, command = ENDINGS[ending]
    job = reading(launcher)
    slurm.run(*(part.format(job=job) for part in command))
    check_saved(folder)


def test_a_preempted_job_goes_on_by_itself_and_no_step_is_lost(slurm, submit, few_images, folder):
    out, run_dir = folder / "out", folder / "run"
    job = submit("requeue.sbatch", *few_images, "--run-dir", run_dir, options=["--exclusive"])
    # It can be stopped from here on, and the more is left to do the better: SLURM takes its time.
    wait_for(lambda: out.exists() and "epoch 1/2" in out.read_text())
    # It needs both nodes, and its partition goes before.
    slurm.run("srun", "--partition=high", "--exclusive", "--nodes=2", "true")
    wait_for(lambda: slurm.state(job) == "COMPLETED", 600, out.read_text)
    printed = out.read_text()
    assert "got SIGUSR2: the run stops at this step" in printed
    after = re.search(r"stopped; --run-dir \S+ resumes after step (\d+)", printed)[1]
    assert f"restored step {after} of " in printed
    assert printed.count("world size 2, nodes 2, launcher slurm") == 2
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", job)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [10, 20]
    assert [line["step"] for line in lines if "test/loss" in line] == [10, 20]
    assert torch.load(run_dir / "weights.pt", weights_only=True)

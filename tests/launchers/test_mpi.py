"""MPI: what `mpirun` starts are ranks, with Open MPI and with MPICH, on one host and on two."""

import re
import subprocess
import sys

import pytest
from namespaces import hosts, require_namespaces
from packages import require
from processes import run, wait_for
from programs import MNIST, WHO, fingerprint, joined

PYTHON = sys.executable

ONE_ON_EACH = [f"rank {rank}/2 local 0/1 node {rank}/2 mpi sum 3" for rank in (0, 1)]


@pytest.fixture
def open_mpi(monkeypatch):
    require(["mpirun.openmpi"], ["openmpi-bin"])
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    return ["mpirun.openmpi", "--oversubscribe"]


@pytest.fixture
def mpich():
    require(["mpiexec.mpich"], ["mpich"])
    return ["mpiexec.mpich"]


@pytest.fixture
def one_and_other(folder):
    """Two hosts, and a program that starts a command line on one of them, as rsh and ssh do."""
    require_namespaces()
    with hosts("one", "other") as both:
        agent = folder / "rsh"
        cases = "\n".join(f"{host.name}) exec {_quoted(host)} ;;" for host in both)
        agent.write_text(f'#!/bin/sh\nhost=$1; shift\nline="$*"\ncase $host in\n{cases}\nesac\n')
        agent.chmod(0o755)
        yield *both, agent


def _quoted(host):
    return " ".join([*(f"'{word}'" for word in host.command()), 'sh -c "$line"'])


def test_two_ranks_train_as_one_process_does(open_mpi, alone, folder):
    printed = run(*open_mpi, "-n", 2, PYTHON, *MNIST, "--run-dir", folder / "run")
    assert joined(printed) == "world size 2, nodes 1, launcher mpi"
    assert fingerprint(printed) == alone


def test_open_mpi_starts_ranks_on_two_hosts(open_mpi, one_and_other):
    one, _, rsh = one_and_other
    printed = run(
        *one.command(
            *open_mpi, "-H", "one,other", "-n", 2, "--mca", "plm_rsh_agent", rsh,
            "--mca", "oob_tcp_if_include", "eth0", "-x", "PATH", "-x", "MASTER_ADDR",
            "-x", "TMPDIR", PYTHON, WHO,
        ),
        MASTER_ADDR="one",
    )  # fmt: skip
    assert sorted(re.findall(r"rank .*", printed)) == ONE_ON_EACH


@pytest.fixture
def mpich_on_two(mpich, one_and_other):
    one, _, rsh = one_and_other
    return one.command(
        *mpich, "-launcher", "rsh", "-launcher-exec", rsh, "-iface", "eth0",
        "-hosts", "one,other", "-ppn", 1, "-n", 2, PYTHON, WHO,
    )  # fmt: skip


def test_mpich_starts_ranks_on_two_hosts(mpich_on_two):
    assert sorted(re.findall(r"rank .*", run(*mpich_on_two, MASTER_ADDR="one"))) == ONE_ON_EACH


def test_two_hosts_and_no_address_is_an_error_that_says_which_variable(mpich_on_two):
    with pytest.raises(AssertionError, match="must be set when MPICH spans") as failed:
        run(*mpich_on_two)
    assert "add `-genv MASTER_ADDR <host of rank 0>` to the command" in str(failed.value)


TWO_RUNS = """
import sys, time
from datetime import timedelta
from pathlib import Path
from pardata import init

folder, name = Path(sys.argv[1]), sys.argv[2]
try:
    with init(timeout=timedelta(seconds=20)) as here:
        (folder / f"{name} joined {here.rank}").touch()
        while name == "first" and not (folder / "second ended").exists():
            time.sleep(0.1)
except RuntimeError as error:
    (folder / f"{name} failed {error}"[:250].replace("/", "|")).touch()
    raise
"""


def test_a_second_run_at_one_port_fails_without_disturbing_the_first(mpich, folder):
    (folder / "two.py").write_text(TWO_RUNS)
    command = [*mpich, "-n", "2", PYTHON, str(folder / "two.py"), str(folder)]
    with subprocess.Popen([*command, "first"], text=True) as first:
        wait_for(lambda: len(list(folder.glob("first joined *"))) == 2)
        second = subprocess.run(
            [*command, "second"], capture_output=True, text=True, timeout=100, check=False
        )
        (folder / "second ended").touch()
        assert first.wait(100) == 0
    assert second.returncode != 0
    assert not list(folder.glob("second joined *"))
    said = second.stderr + "".join(path.name for path in folder.glob("second failed *"))
    mixed = r"is the store of MPICH's run under process \d+, not MPICH's"
    assert "is in use: set another" in said or re.search(mixed, said)

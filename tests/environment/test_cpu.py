"""How many cores a rank may use: affinity, quota, and who shares them."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pardata import world
from pardata.environment import _cpu
from pardata.environment._cpu import cgroup_cpu_quota, cpus_per_rank


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a machine with so many cores, so many allowed, and a quota.

    So many ranks are bound to the same cores; 0: there is no group that knows.
    """

    def pretend(cores, allowed, quota=None, *, sharers=0):
        state = SimpleNamespace(cpu_sharers=sharers) if sharers else None
        monkeypatch.setattr(_cpu, "group_state", lambda: state)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(
            os, "sched_getaffinity", lambda _pid: set(range(allowed)), raising=False
        )
        monkeypatch.setattr(_cpu, "cgroup_cpu_quota", lambda: quota)
        monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)

    return pretend


def rank(local_size=1, launcher="torchrun"):
    return replace(world(), local_size=local_size, launcher=launcher)


CORES = [
    ((16, 16, None), 1, 1, "single", 16),
    ((16, 16, None), 0, 4, "torchrun", 4),
    ((16, 16, None), 0, 32, "existing", 1),
    # Each rank is bound, by SLURM, torchrun's --numa-binding=exclusive or numactl.
    ((16, 4, None), 1, 4, "slurm", 4),
    ((64, 8, None), 1, 8, "torchrun", 8),
    # Those of a socket are bound to its cores, by --numa-binding=node.
    ((16, 8, None), 4, 8, "torchrun", 2),
    # They are not: they share what they are allowed.
    ((16, 16, None), 4, 4, "slurm", 4),
    ((16, 8, None), 4, 4, "torchrun", 2),
    # A quota is the container's, for all its ranks.
    ((16, 16, 8.0), 4, 4, "torchrun", 2),
    ((16, 16, 0.5), 1, 1, "single", 1),
    ((16, 4, 8.0), 1, 4, "slurm", 2),
]


@pytest.mark.parametrize("case", CORES, ids=str)
def test_the_cores_of_a_rank(machine, case):
    machine_has, sharers, local_size, launcher, cores = case
    machine(*machine_has, sharers=sharers)
    assert cpus_per_rank(rank(local_size, launcher)) == cores


JOBS = [
    (16, 16, 2),  # of 64, and the tasks are not bound: they share the job's
    (64, 16, 2),  # … and nothing confines them to those
    (64, 64, 8),  # the whole machine
]


@pytest.mark.parametrize(("allowed", "of_the_job", "cores"), JOBS)
def test_tasks_of_slurm_share_the_cores_of_their_job(
    allowed, of_the_job, cores, machine, monkeypatch
):
    machine(64, allowed)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", str(of_the_job))
    assert cpus_per_rank(rank(8, "slurm")) == cores
    # An allocation in which somebody else started the ranks says nothing of them.
    assert cpus_per_rank(rank(8, "torchrun")) == max(1, allowed // 8)


def test_without_affinity_all_cores_count(machine, monkeypatch):
    machine(6, 6)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cpus_per_rank(rank(2)) == 3
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cpus_per_rank(rank(1)) == 1


QUOTAS = [
    (2, "max", "100000", None),
    (2, "50000", "100000\n", 0.5),
    (1, "-1", "100000", None),
    (1, "150000\n", "100000\n", 1.5),
    (0, "", "", None),  # nothing says so
]


@pytest.mark.parametrize(("version", "limit", "period", "cores"), QUOTAS)
def test_the_quota_of_each_version_of_cgroup(tmp_path, version, limit, period, cores):
    (tmp_path / "cpu").mkdir()
    if version == 2:
        (tmp_path / "cpu.max").write_text(f"{limit} {period}")
    elif version == 1:
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text(limit)
        (tmp_path / "cpu/cpu.cfs_period_us").write_text(period)
    assert cgroup_cpu_quota(tmp_path) == cores

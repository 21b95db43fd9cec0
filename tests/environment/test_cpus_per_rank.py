"""How many cores a rank may use: affinity, quota, and who shares them."""

import os
from types import SimpleNamespace

import pytest

from pardata.environment import _device, _world
from pardata.environment._device import cgroup_cpu_quota
from pardata.environment._world import cpus_per_rank


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a machine with so many cores, so many allowed, and a quota.

    So many ranks are bound to the same cores; 0: there is no group that knows.
    """

    def pretend(cores, allowed, quota=None, *, sharers=0):
        state = SimpleNamespace(cpu_sharers=sharers) if sharers else None
        monkeypatch.setattr(_world, "group_state", lambda: state)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(
            os, "sched_getaffinity", lambda _pid: set(range(allowed)), raising=False
        )
        monkeypatch.setattr(_device, "cgroup_cpu_quota", lambda: quota)

    return pretend


CORES = [
    ((16, 16), {"sharers": 1}, 1, 16),
    ((16, 16), {}, 32, 1),
    # Each rank is bound, by SLURM, torchrun's --numa-binding=exclusive or numactl.
    ((16, 4), {"sharers": 1}, 4, 4),
    # Those of a socket are bound to its cores, by --numa-binding=node.
    ((16, 8), {"sharers": 4}, 8, 2),
    # They are not: they share what they are allowed.
    ((16, 8), {"sharers": 4}, 4, 2),
    # A quota is the container's, for all its ranks.
    ((16, 16, 8.0), {"sharers": 4}, 4, 2),
    ((16, 16, 0.5), {"sharers": 1}, 1, 1),
    ((16, 4, 8.0), {"sharers": 1}, 4, 2),
]


@pytest.mark.parametrize("case", CORES, ids=str)
def test_the_cores_of_a_rank(machine, case):
    machine_has, more, local_size, cores = case
    machine(*machine_has, **more)
    assert cpus_per_rank(local_size) == cores


def test_without_affinity_all_cores_count(machine, monkeypatch):
    machine(6, 6)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cpus_per_rank(2) == 3
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cpus_per_rank(1) == 1


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

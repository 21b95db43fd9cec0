"""A group that meets fault after fault goes on, and holds no more of the machine than before."""

import sys
from functools import partial

import pytest
from on_ranks import run
from soaking import FAULTS, soak

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def check(told):
    """Check what three ranks say of a soak."""
    for counts, rounds, steps, _, _ in told:
        assert (counts, rounds, steps) == told[0][:3]
        assert sum(counts.values()) == rounds  # an error on every rank, each time
    return told[0]


def test_after_each_fault_the_group_goes_on(tmp_path):
    _, rounds, *_ = check(run(partial(soak, rounds=12), str(tmp_path / "run"), 0, world_size=3))
    assert rounds == 12


@pytest.mark.soak
def test_for_half_an_hour_of_faults_nothing_grows(tmp_path, capsys):
    long = partial(soak, seconds=1800)
    told = run(long, str(tmp_path / "run"), 1, world_size=3, timeout=2400)
    counts, rounds, steps, early, late = check(told)
    assert set(counts) == set(FAULTS)
    with capsys.disabled():
        print(f"\n{rounds} faults, {steps} steps: {counts}\nat first {early}\nat last {late}")
    for _, _, _, early, late in told:
        assert late["MB of memory"] < 1.05 * early["MB of memory"]
        for what in ("open files", "threads", "shared-memory segments"):
            assert late[what] <= early[what] + 1

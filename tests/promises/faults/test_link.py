"""The link between two nodes is cut in the middle of training, and comes back."""

import sys
import time

import pytest
from hosts import reason_for_none, two_hosts
from killing import TRAINING, Ended, undisturbed

TIMEOUT = 10  # of the group, in seconds; a busy machine starts two ranks seconds apart


def start(hosts, run_dir, *options):
    """Start a rank on each host."""
    jobs = []
    for rank, host in enumerate(hosts):
        variables = {
            "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1,
            "GROUP_RANK": rank, "GROUP_WORLD_SIZE": 2,
            "MASTER_ADDR": hosts[0].address, "MASTER_PORT": 29400,  # its namespace is ours alone
        }  # fmt: skip
        env = {name: str(value) for name, value in variables.items()}
        command = [sys.executable, TRAINING, "--run-dir", run_dir, "--timeout", TIMEOUT, *options]
        jobs.append(host.start(command, run_dir / f"log-{rank}.txt", **env))
    return jobs


def wait_for_checkpoint(run_dir, jobs):
    deadline = time.monotonic() + 60
    while not list(run_dir.glob("checkpoints/attempt-*-step-*")):
        assert time.monotonic() < deadline
        assert all(job.poll() is None for job in jobs), (run_dir / "log-0.txt").read_text()
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="has no network namespaces")
def test_a_link_that_is_cut_is_an_error_within_the_timeout_and_the_run_goes_on(tmp_path):
    if reason := reason_for_none():
        pytest.skip(reason)
    with two_hosts() as hosts:
        jobs = start(hosts, tmp_path, "--steps", "100000")
        try:
            wait_for_checkpoint(tmp_path, jobs)
            hosts[1].cut()
            cut = time.monotonic()
            codes = [job.wait(timeout=60) for job in jobs]
            seconds = time.monotonic() - cut
        finally:
            for job in jobs:
                job.kill()
                job.wait()
        logs = [(tmp_path / f"log-{rank}.txt").read_text() for rank in range(2)]
        assert all(codes), logs
        assert seconds < 5 * TIMEOUT
        for rank, log in enumerate(logs):
            assert f"[{rank}/2] failed" in log, log
        hosts[1].heal()
        done = int(max(tmp_path.glob("checkpoints/attempt-*-step-*")).name[-9:])
        steps = done - done % 6 + 12  # the end of an epoch
        jobs = start(hosts, tmp_path, "--steps", steps)
        assert [job.wait(timeout=120) for job in jobs] == [0, 0]
    ended = Ended.of((tmp_path / "log-0.txt").read_text())
    assert ended == undisturbed(tmp_path / "undisturbed", steps)

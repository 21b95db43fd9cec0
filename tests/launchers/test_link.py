"""The link between two nodes is cut in the middle of training, and comes back."""

import sys
import time

import pytest
from killing import TRAINING, Ended, undisturbed
from namespaces import hosts, require_namespaces
from processes import start, wait_for

TIMEOUT = 10  # of the group, in seconds; a busy machine starts two ranks seconds apart


def started(both, run_dir, *options):
    """Start a rank on each host."""
    jobs = []
    for rank, host in enumerate(both):
        variables = {
            "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1,
            "GROUP_RANK": rank, "GROUP_WORLD_SIZE": 2, "GLOO_SOCKET_IFNAME": "eth0",
            "MASTER_ADDR": both[0].address, "MASTER_PORT": 29400,  # its namespace is ours alone
        }  # fmt: skip
        env = {name: str(value) for name, value in variables.items()}
        command = [sys.executable, TRAINING, "--run-dir", run_dir, "--timeout", TIMEOUT, *options]
        with (run_dir / f"log-{rank}.txt").open("a") as log:
            jobs.append(start(*host.command(*command), stdout=log, **env))
    return jobs


@pytest.mark.skipif(sys.platform != "linux", reason="has no network namespaces")
def test_a_cut_link_raises_within_the_timeout_and_the_run_resumes(tmp_path):
    require_namespaces()
    with hosts("one", "other") as both:
        jobs = started(both, tmp_path, "--steps", "100000")
        wait_for(
            lambda: any(tmp_path.glob("checkpoints/attempt-*-step-*")),
            60, (tmp_path / "log-0.txt").read_text, often=0.01,
        )  # fmt: skip
        both[1].link("down")
        cut = time.monotonic()
        codes = [job.wait(timeout=60) for job in jobs]
        seconds = time.monotonic() - cut
        logs = [(tmp_path / f"log-{rank}.txt").read_text() for rank in range(2)]
        assert all(codes), logs
        assert seconds < 5 * TIMEOUT
        for rank, log in enumerate(logs):
            assert f"[{rank}/2] failed" in log, log
        both[1].link("up")
        done = int(max(tmp_path.glob("checkpoints/attempt-*-step-*")).name[-9:])
        steps = done - done % 6 + 12  # the end of an epoch
        jobs = started(both, tmp_path, "--steps", steps)
        assert [job.wait(timeout=120) for job in jobs] == [0, 0]
    ended = Ended.of((tmp_path / "log-0.txt").read_text())
    assert ended == undisturbed(tmp_path / "undisturbed", steps)

"""torchrun: on one host with a signal, and on two while a node dies and another joins.

With SLURM and Kubernetes it trains on two hosts: see test_slurm.py and test_kubernetes.py.
"""

import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from namespaces import hosts, require_namespaces
from processes import ended, run, start, wait_for
from programs import TORCHRUN

from pardata import Checkpointer

TRAINING = Path(__file__).parents[1] / "promises" / "faults" / "training.py"
STOPPING = Path(__file__).parents[1] / "helpers" / "stopping.py"
# Short times until a node counts as gone, and until a smaller world begins without it.
ELASTIC = [
    "--nnodes=1:2", "--max-restarts=3",
    "--rdzv-conf=last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=3",
]  # fmt: skip
# Without it torch 2.15's agents cannot take in a node that comes later.
REJOIN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def two():
    """Two hosts with a link between them."""
    require_namespaces()
    with hosts("one", "other") as both:
        yield both


class Node:
    """An agent on a host, and what it prints."""

    def __init__(self, host, log, *command, **env):
        meeting = ["--rdzv-id=1", "--rdzv-backend=c10d", "--rdzv-endpoint=one:29400"]
        self.log = log
        with log.open("a") as file:
            self.agent = start(
                *host.command(*TORCHRUN, "--nproc-per-node=1", *meeting, *command),
                stdout=file, **env,
            )  # fmt: skip

    def printed(self):
        return self.log.read_text()


@pytest.fixture
def nodes(two, folder):
    """Start nodes by ``nodes(index, *command)``; at the end all are gone."""
    with ExitStack() as stack:

        def begin(index, *command, **env):
            node = Node(two[index], folder / f"node{index}.txt", *command, **env)
            stack.enter_context(ended(node.agent))
            return node

        yield begin


def ended_well(*started):
    """Wait for agents and return what they printed."""
    codes = [node.agent.wait(timeout=300) for node in started]
    printed = "".join(node.printed() for node in started)
    assert codes == [0] * len(started), printed
    return printed


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGUSR2", marks=pytest.mark.soak)])
# test_slurm.py forks workers.
@pytest.mark.parametrize("starts", ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
def test_a_signal_of_torchrun_stops_a_run_that_has_workers(starts, name, folder):
    options = ["--standalone", "--nproc-per-node=2", "--signals-to-handle=SIGTERM,SIGUSR2"]
    with (folder / "out").open("w") as file:
        job = start(*TORCHRUN, *options, STOPPING, starts, 1, folder / "run", stdout=file)
    printed = (folder / "out").read_text
    with ended(job):
        wait_for(lambda: printed().count("reads") == 2 or job.poll() is not None, what=printed)
        job.send_signal(getattr(signal, name))
        job.wait(100)  # with a status that is not 0, also if its ranks ended well
    step = re.search(r"stopped after (\d+)", printed())
    assert step, printed()
    assert printed().count(step[0]) == printed().count("ended well") == 2
    assert Checkpointer(folder / "run").steps()[-1] == int(step[1])


def test_a_run_with_a_replaced_node_ends_as_an_undisturbed_one(two, nodes, folder):
    own = [TRAINING, "--steps", 18, "--save-every", 1]
    undisturbed = run(sys.executable, *own, "--run-dir", folder / "undisturbed")
    command = [*ELASTIC, *own, "--run-dir", folder / "run", "--wait", "4:2", "8:1", "12:2"]
    one, other = nodes(0, *command, **REJOIN), nodes(1, *command, **REJOIN)

    def reached(text):
        wait_for(lambda: text in one.printed() + other.printed(), what=one.printed)

    reached("after step 8 a world of 2 waits for one of 1")
    two[1].power_off()
    reached("after step 12 a world of 1 waits for one of 2")
    again = nodes(1, *command, **REJOIN)
    printed = ended_well(one, again)
    ended = r"ended 18 \w{64} \d+ \d+"  # with its weights, and how often samples were seen
    assert re.findall(ended, printed) == [re.search(ended, undisturbed)[0]]
    steps = dict(re.findall(r"step (\d+) in a world of (\d)", printed))
    assert [steps[str(step)] for step in range(9, 13)] == ["1"] * 4
    assert [steps[str(step)] for step in (*range(5, 9), *range(13, 19))] == ["2"] * 10

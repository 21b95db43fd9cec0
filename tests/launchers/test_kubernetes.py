"""Kubernetes: the example is a valid PyTorchJob, and what its pods start trains as ever.

There is no cluster here: the operator's part, a handful of variables, is played by `variables`.
"""

import copy
import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from namespaces import hosts, require_namespaces
from places import EXAMPLES
from processes import ended, start
from programs import MNIST, fingerprint, joined
from schema import complaints

yaml = pytest.importorskip("yaml")

JOB = yaml.safe_load((EXAMPLES / "kubernetes" / "pytorchjob.yaml").read_text())
SCHEMA = json.loads((Path(__file__).parent / "pytorchjob.schema.json").read_text())


def objections(job):
    return list(complaints(job, SCHEMA, SCHEMA["definitions"]))


def test_the_example_is_a_valid_job():
    assert objections(JOB) == []


REPLICAS = ["spec", "pytorchReplicaSpecs"]
WORKER, TEMPLATE = [*REPLICAS, "Worker"], [*REPLICAS, "Worker", "template"]
NAMED = "template.spec.containers[0].name must be one of ['pytorch'], but is 'torch'"


@pytest.mark.parametrize(
    ("path", "value", "objection"),
    [
        (["kind"], "PytorchJob", "it.kind must be one of ['PyTorchJob']"),
        (["spec", "nprocPerNode"], 2, "it.spec.nprocPerNode must be of type string, but is 2"),
        ([*REPLICAS, "Master", "replicas"], 2, "replicas must be one of [1]"),
        (TEMPLATE, {"spec": {"containers": [{"name": "torch", "image": "x"}]}}, NAMED),
    ],
)
def test_a_job_that_the_operator_would_refuse_is_found(path, value, objection):
    place = job = copy.deepcopy(JOB)
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    (found,) = objections(job)
    assert objection in found


def variables(job, rank, nodes):
    """Return what the operator (training-operator 1.9) sets in the pod of that rank."""
    address, port = f"{job['metadata']['name']}-master-0", "23456"
    processes = int(job["spec"]["nprocPerNode"])
    counts = {"WORLD_SIZE": nodes * processes, "RANK": rank, "PET_NODE_RANK": rank}  # of the pod
    counts |= {"PET_NNODES": nodes, "PET_NPROC_PER_NODE": processes, "PYTHONUNBUFFERED": 1}
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": port}
    meeting |= {f"PET_{name}": value for name, value in meeting.items()}
    return meeting | {name: str(number) for name, number in counts.items()}


def test_the_pods_train_as_one_process_does(alone, folder):
    require_namespaces()
    job = copy.deepcopy(JOB)
    job["spec"]["nprocPerNode"] = "1"
    name, replicas = job["metadata"]["name"], job["spec"]["pytorchReplicaSpecs"]
    pods = [f"{name}-{kind.lower()}-0" for kind in replicas]
    with hosts(*pods) as both, ExitStack() as stack:
        started = []
        for rank, (host, replica) in enumerate(zip(both, replicas.values(), strict=True)):
            (container,) = replica["template"]["spec"]["containers"]
            program, *options, script = container["command"]
            assert program == "torchrun"
            command = [sys.executable, "-m", "torch.distributed.run", *options]
            command += [EXAMPLES.parent / script, *container["args"]]
            command += [*MNIST[1:], "--run-dir", folder / "run"]  # the last of two counts
            with (folder / f"pod{rank}.txt").open("w") as log:
                agent = start(*host.command(*command), stdout=log, **variables(job, rank, 2))
            started.append(stack.enter_context(ended(agent)))
        codes = [agent.wait(timeout=300) for agent in started]
        printed = "".join(file.read_text() for file in sorted(folder.glob("pod*.txt")))
    assert codes == [0, 0], printed
    assert joined(printed) == "world size 2, nodes 2, launcher torchrun"
    assert fingerprint(printed) == alone

"""What the tests on GPUs share: the device, and groups of ranks that compute there.

With ``--device=cpu`` those that take `device` or `everywhere` run on a CPU, to show that they run.
What takes `gpu` or `needs_two` shows nothing there.
"""

from functools import partial

import pytest
import torch
from launched import launched
from on_ranks import Raised, run

GPUS = torch.cuda.device_count()


def pytest_itemcollected(item):
    # What a torch for GPUs warns of nobody here has seen: it must not fail a test.
    item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def device(pytestconfig):
    """The device of one process, as `init` takes it."""
    kind = pytestconfig.getoption("--device")
    if kind == "cuda" and GPUS == 0:
        pytest.skip("there is no CUDA device")
    return "cuda:0" if kind == "cuda" else kind


@pytest.fixture
def gpu(device):
    """The same, for what a CPU has none of."""
    if device == "cpu":
        pytest.skip("shows nothing on a CPU")
    return device


@pytest.fixture
def needs_two(gpu):
    if GPUS < 2:
        pytest.skip(f"needs two GPUs, and there are {GPUS}")


@pytest.fixture
def over_gloo(everywhere, request):
    """Whether the ranks are two on one GPU, for what gloo cannot there."""
    return "gloo" in request.node.name and GPUS > 0


def _results(found):
    for result in found:
        if isinstance(result, Raised):
            raise AssertionError(f"{result.type}: {result.text}")
    return found


def _launched(fn, device, *args, size, **variables):
    return _results(launched(fn, device, *args, size=size, **variables))


@pytest.fixture(params=["NCCL, one rank", "gloo, two ranks on one GPU", "NCCL, two ranks"])
def everywhere(request, device):
    """Run ``fn(device, *args)`` on each rank of a kind of group: `fn` calls ``init(device=…)``.

    Keyword arguments are environment variables: with them the ranks have processes of their own.
    """
    if request.param.startswith("gloo"):
        return partial(_run_on_one, device)
    size = 1 if request.param.endswith("one rank") else 2
    own = "cuda" if device.startswith("cuda") else device  # each rank has one of its own
    if own == "cuda" and size > GPUS:
        pytest.skip(f"needs {size} GPUs, and there are {GPUS}")
    return lambda fn, *args, **env: _launched(fn, own, *args, size=size, **env)


def _run_on_one(device, fn, *args, **env):
    return run(fn, device, *args, world_size=2, env=env)

"""What the tests on GPUs share: the device, and groups of ranks that compute there.

With ``--device=sim`` they run on a simulated accelerator, except what needs CUDA itself. With
``--device=cpu`` those that take `device` or `everywhere` run on a CPU, to show that they run: what
takes `gpu` or `needs_two` shows nothing there.
"""

from functools import partial

import pytest
import simulated
import torch
from launched import launched
from on_ranks import Raised, run


def pytest_itemcollected(item):
    # What a torch for GPUs warns of nobody here has seen: it must not fail a test.
    item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_ignore_collect(collection_path, config):
    """Test the simulated accelerator only if it is asked for, and take no part of it for tests."""
    if collection_path.parent.name != "simulated":
        return None
    is_wanted = config.getoption("--device") == "sim" and collection_path.name.startswith("test_")
    return None if is_wanted else True


def count(kind):
    """Return how many devices of a kind there are."""
    return torch.get_device_module(kind).device_count()


@pytest.fixture(scope="session", autouse=True)
def _simulated(pytestconfig):
    """Have the simulated accelerator, if it is asked for, here and in all processes to come."""
    if pytestconfig.getoption("--device") == "sim":
        from simulated.building import why_not  # not for the others

        if (reason := why_not()) is not None:
            pytest.skip(f"the simulated accelerator {reason}")
        simulated.load()


@pytest.fixture(scope="session")
def hardware(pytestconfig, _simulated):
    """The type of the devices: "cuda", "sim" or "cpu"."""
    hardware = pytestconfig.getoption("--device")
    if hardware != "cpu" and count(hardware) == 0:
        pytest.skip(f"there is no {hardware.upper()} device")
    return hardware


@pytest.fixture(scope="session")
def device(hardware):
    """The device of one process, as `init` takes it."""
    return hardware if hardware == "cpu" else f"{hardware}:0"


@pytest.fixture
def gpu(device):
    """The same, for what a CPU has none of."""
    if device == "cpu":
        pytest.skip("shows nothing on a CPU")
    return device


@pytest.fixture
def needs_two(gpu, hardware):
    if count(hardware) < 2:
        pytest.skip(f"needs two GPUs, and there is {count(hardware)}")


def _results(found):
    for result in found:
        if isinstance(result, Raised):
            raise AssertionError(f"{result.type}: {result.text}")
    return found


def _launched(fn, device, *args, size, **variables):
    return _results(launched(fn, device, *args, size=size, **variables))


@pytest.fixture(params=[1, 2], ids=["NCCL, one rank", "NCCL, two ranks"])
def over_nccl(request, hardware):
    """Run ``fn(device, *args)`` on each rank of a group: `fn` calls ``init(device=…)``.

    NCCL stands for the device's own backend, and each rank has a device of its own. Keyword
    arguments are environment variables: with them the ranks have processes of their own.
    """
    return _with_devices_of_their_own(hardware, request.param)


@pytest.fixture(params=["NCCL, one rank", "gloo, two ranks on one GPU", "NCCL, two ranks"])
def everywhere(request, hardware, device):
    """Do the same on each rank of every kind of group, gloo's for two ranks on one GPU too."""
    if request.param.startswith("gloo"):
        return partial(_run_on_one, device)
    return _with_devices_of_their_own(hardware, 1 if "one rank" in request.param else 2)


def _with_devices_of_their_own(hardware, size):
    if hardware != "cpu" and size > count(hardware):
        pytest.skip(f"needs {size} GPUs, and there is {count(hardware)}")
    return lambda fn, *args, **env: _launched(fn, hardware, *args, size=size, **env)


def _run_on_one(device, fn, *args, **env):
    return run(fn, device, *args, world_size=2, env=env)

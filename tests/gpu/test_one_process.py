"""One process on an accelerator without streams, float64 and collectives, as MPS is.

The simulated one pretends to have none. Run with ``pytest -m gpu --device=sim``.
"""

import pytest
import torch
import torch.distributed as dist
from common_gpu import NoFloat64, widest_without_float64
from torch import nn
from torch.utils.data import TensorDataset

import pardata
from pardata.collectives import _fingerprint
from pardata.environment import _device
from pardata.strategies import _step_metrics


@pytest.fixture
def narrow(gpu, hardware, monkeypatch):
    if hardware != "sim":
        pytest.skip("needs the simulated accelerator, which can pretend")
    monkeypatch.delattr(torch.sim, "Stream")
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "sim", "gloo")
    monkeypatch.setitem(dist.Backend.backend_capability, "gloo", ["cpu"])
    for module in (_fingerprint, _step_metrics):
        monkeypatch.setattr(module, "widest_float_dtype", widest_without_float64)
    assert not _device.has_streams(torch.device(gpu))
    return gpu


def loss_and_metrics(model, batch):
    rows, labels = batch
    out = model(rows)
    metrics = {
        "right": (out.argmax(1) == labels).float().mean(),
        "wide": torch.tensor([1.5], dtype=torch.float64),  # on the CPU
        "number": 2,
    }
    return nn.functional.cross_entropy(out, labels), metrics


@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_a_whole_run_needs_no_streams_no_float64_and_no_collectives(
    narrow, microbatch_size, tmp_path
):
    pardata.seed_everything(1)
    data = TensorDataset(torch.randn(16, 4), torch.arange(16) % 3)
    with NoFloat64(), pardata.init(device="sim") as here:
        assert (str(here.device), here.backend) == (narrow, "gloo")
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
        model = pardata.wrap_model(net)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = pardata.make_loader(data, 8, seed=0, microbatch_size=microbatch_size)
        run = {"model": model, "optimizer": optimizer, "loader": loader}
        checkpointer = pardata.Checkpointer(tmp_path, asynchronous=True)
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            loss, means = pardata.backward(model, loss_and_metrics, batch)
            optimizer.step()
            checkpointer.save(step, **run)
            assert (loss.device.type, loss.dtype) == ("sim", torch.float32)
            assert (means["wide"].tolist(), means["number"]) == ([1.5], 2)
        checkpointer.wait()
        of_all = [pardata.all_reduce_mean, pardata.all_reduce_sum, pardata.all_reduce_max]
        value = {"loss": loss, "two": torch.tensor([1, 2], device="sim"), "n": 3}
        for call in of_all:
            found = call(value)
            assert found["loss"].device == found["two"].device == here.device
            assert (found["loss"], found["two"].tolist(), found["n"]) == (loss, [1, 2], 3)
        assert pardata.all_gather(loss) == [loss]
        pardata.check_in_sync(model)
        before = pardata.fingerprint(model)
        pardata.backward(model, loss_and_metrics, next(iter(loader)))
        optimizer.step()
        assert pardata.fingerprint(model) != before
        pardata.Checkpointer(tmp_path).restore(**run)
        assert pardata.fingerprint(model) == before

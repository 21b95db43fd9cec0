"""Checkpoints of what is on a GPU: at once and in the background, restored on the CPU and back.

Run with ``pytest -m gpu``; with ``--device=cpu`` on a CPU.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pardata import Checkpointer, backward, fingerprint, init, make_loader, wrap_model


def mean_loss(model, batch):
    return model(batch[0]).square().mean()


def a_run(device, strategy):
    """Return a model, its optimizer and loader, new."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    model = wrap_model(net, strategy, device=device)
    data = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)))
    loader = make_loader(data, 8, shuffle=True, seed=0, device=device)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "loader": loader}


def train(run, steps):
    batches = iter(run["loader"])
    for _ in range(steps):
        run["optimizer"].zero_grad()
        backward(run["model"], mean_loss, next(batches))
        run["optimizer"].step()
    return fingerprint(run["model"])


def saved_and_restored(device, strategy, directory, asynchronous):
    """Save in the middle of an epoch, train on, and go back: there, on the CPU, and from there."""
    with init(device=device) as here:
        run = a_run(here.device, strategy)
        checkpointer = Checkpointer(directory, asynchronous=asynchronous)
        before = train(run, 2)
        checkpointer.save(2, **run, extra=torch.ones(3, device=here.device))
        batches = iter(run["loader"])
        for _ in range(2):  # changes what may still be on its way to the disk
            backward(run["model"], mean_loss, next(batches))
            run["optimizer"].step()
        after = fingerprint(run["model"])
        checkpointer.wait()
        found = []
        for place in (here.device, torch.device("cpu")):
            other = a_run(place, strategy)
            Checkpointer(directory).restore(**other)
            assert {p.device for p in other["model"].parameters()} == {place}
            state = other["optimizer"].state_dict()["state"].values()
            assert all(part["exp_avg"].device == place for part in state)
            found.append(fingerprint(other["model"]))
        back = f"{directory}/from the CPU"
        Checkpointer(back).save(3, **other)
        other = a_run(here.device, strategy)
        Checkpointer(back).restore(**other)
        found.append(fingerprint(other["model"]))
        return before, after, found


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_a_checkpoint_is_of_its_step_and_goes_anywhere(
    strategy, asynchronous, everywhere, tmp_path
):
    found = everywhere(saved_and_restored, strategy, str(tmp_path), asynchronous)
    for before, after, restored in found:
        assert before != after
        assert restored == [before] * 3


def stepped(device):
    scale = nn.Parameter(torch.ones((), device=device))
    optimizer = torch.optim.Adam([scale])
    scale.square().backward()
    optimizer.step()
    return optimizer


def test_the_steps_of_a_parameter_without_dimensions_stay_on_the_cpu(device, tmp_path):
    optimizer = stepped(device)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, optimizer=optimizer)
    checkpointer.restore(optimizer=optimizer)
    ((parameter, state),) = optimizer.state.items()
    assert state["step"].device.type == "cpu"
    assert state["exp_avg"].device == parameter.device

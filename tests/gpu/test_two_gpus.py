"""Two GPUs in one process: loaders, models and checkpoints on both.

Run with ``pytest -m gpu`` on a machine with two GPUs, or with ``--device=sim``.
"""

import pytest
import torch
from common_gpu import Spread, late, nothing_waits, seeded
from torch.utils.data import TensorDataset

from pardata import Checkpointer, all_reduce_mean, backward, make_loader, wrap_model

pytestmark = pytest.mark.usefixtures("needs_two")
STEPS, ROWS, WIDTH = 6, 4, 5000


@pytest.fixture
def places(hardware):
    """The two devices; the first is the current one, before and after."""
    own = torch.get_device_module(hardware)
    own.set_device(0)
    yield [torch.device(hardware, number) for number in range(2)]
    assert own.current_device() == 0


def loader_on(place, start, **options):
    """Return a loader of which every number in step k is `start` + k, each of them there late."""

    def slowly(batch):
        return late(place, batch[0])

    steps = torch.arange(STEPS).repeat_interleave(ROWS) + float(start)
    data = TensorDataset(steps[:, None].expand(-1, WIDTH).contiguous())
    return make_loader(data, ROWS, device=place, batch_transform=slowly, seed=0, **options)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_loader_on_each_gives_each_its_own(prefetch, places):
    loaders = [loader_on(place, 100 * n, prefetch=prefetch) for n, place in enumerate(places)]
    found = []
    for batches in zip(*loaders, strict=True):
        assert [batch.device for batch in batches] == places
        found.append([torch.stack([batch.min(), batch.max()]) for batch in batches])
        del batches
    expected = [[[k, k], [100 + k, 100 + k]] for k in range(STEPS)]
    assert [[pair.tolist() for pair in pairs] for pairs in found] == expected


def mean_loss(model, batch):
    return model(batch[0]).square().mean()


def batches_on(place):
    rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    return make_loader(TensorDataset(rows), 6, seed=0, device=place)


def test_a_model_on_two_gpus_trains_as_on_the_cpu(places):
    found = []
    for where in (["cpu", "cpu"], places):
        model = wrap_model(seeded(Spread, where), "none", device=where[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(3):
            with nothing_waits(where[0] if epoch else "cpu"):
                for batch in batches_on(where[0]):
                    optimizer.zero_grad()
                    loss = backward(model, mean_loss, batch)
                    all_reduce_mean({"loss": loss, "count": 3})
                    optimizer.step()
        found.append([loss.cpu(), *(parameter.cpu() for parameter in model.parameters())])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("slower", [0, 1])
def test_an_asynchronous_checkpoint_of_both_is_of_its_step(slower, places, tmp_path):
    model = seeded(Spread, places)
    late(places[slower], torch.ones(1))  # so that the other is ready first
    for parameter in model.parameters():  # in the making on each device when they are saved
        parameter.data = late(parameter.device, parameter.detach())
    with Checkpointer(tmp_path, asynchronous=True) as checkpointer:
        checkpointer.save(1, model=model, extra=[late(place, torch.ones(9)) for place in places])
        with torch.no_grad():
            for parameter in model.parameters():  # the next step writes
                parameter.fill_(float("nan"))
    restored = Checkpointer(tmp_path).restore(model=model)
    assert [part.tolist() for part in restored.values["extra"]] == [[1.0] * 9] * 2
    expected = seeded(Spread, ["cpu", "cpu"])
    for ours, parameter in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.cpu(), parameter)

"""Batches on their device: batch_transform, and running ahead, of which a CPU sees nothing."""

import os

import pytest
import torch
from common_data import loader_of as any_loader_of
from torch.utils.data import get_worker_info

from pardata.data._device_prefetch import to_device


def loader_of(transform, **options):
    return any_loader_of(7, 3, batch_transform=transform, **options)


# --- batch_transform ---


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_runs_on_each_batch_in_the_main_process(workers):
    seen = []

    def transform(batch):
        seen.append((os.getpid(), get_worker_info(), batch.tolist()))
        return batch * 2

    loader = loader_of(transform, num_workers=workers)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 2, 4], [6, 8, 10], [12]]
    here = os.getpid()
    assert seen == 2 * [(here, None, [0, 1, 2]), (here, None, [3, 4, 5]), (here, None, [6])]


def test_a_transform_gets_batches_on_the_device_and_returns_any_object():
    def collate(samples):
        return {"x": [torch.tensor(samples), "text"]}

    def transform(batch):
        tensor, text = batch["x"]
        return tensor.device.type, len(tensor), text

    options = {"collate_fn": collate, "device": "meta"}
    found = list(loader_of(transform, **options))
    assert found == [("meta", 3, "text"), ("meta", 3, "text"), ("meta", 1, "text")]
    steps = [list(step) for step in loader_of(transform, microbatch_size=2, **options)]
    both = [("meta", 2, "text"), ("meta", 1, "text")]
    assert steps == [both, both, both[1:]]


class Torn(Exception):  # noqa: N818  # a user's own
    pass


def fails_at_the_second(batch):
    if 3 in batch:
        raise Torn
    return batch


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 2}, {"reproducible": False}])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_transform_names_its_step(workers, options):
    loader = loader_of(fails_at_the_second, num_workers=workers, **options)
    batches = iter(loader)
    next(batches)
    with pytest.raises(RuntimeError, match="`batch_transform` failed in step 1 of") as told:
        next(batches)
    assert isinstance(told.value.__cause__, Torn)
    del batches
    assert loader.state_dict()["delivered"] == 3  # what the loop never got does not count
    assert loader.epoch == 1
    assert len(next(iter(loader))) in (2, 3)


def test_an_error_in_a_transform_leaves_the_generators_alone():
    def draws_and_fails(batch):
        torch.rand(len(batch))
        raise Torn

    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="Torn"):
        list(loader_of(draws_and_fails, microbatch_size=2))
    assert torch.equal(torch.get_rng_state(), state)


# --- running ahead: on a GPU, also a simulated one, in tests/gpu/test_prefetching.py ---


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_on_a_cpu_nothing_runs_ahead(prefetch):
    seen = []
    loader = loader_of(lambda batch: seen.append(len(batch)) or batch, prefetch=prefetch)
    for step, batch in enumerate(loader):
        assert len(seen) == step + 1
        assert batch.tolist() == [*range(7)][3 * step : 3 * step + 3]


@pytest.mark.parametrize(("device", "waits"), [("cuda", False), ("mps", True), ("xpu", False)])
def test_only_a_copy_to_a_device_with_streams_is_not_waited_for(device, waits, monkeypatch):
    # On mps a copy that nobody waits for reads what is gone: pytorch/pytorch#139550.
    def to(_, where, *, non_blocking):
        return where, non_blocking

    monkeypatch.setattr(torch.Tensor, "to", to)
    device = torch.device(device)
    assert to_device([torch.ones(1)], device) == [(device, not waits)]

"""Batches on their device: batch_transform, and running ahead, of which a CPU sees nothing."""

import os
import weakref
from contextlib import contextmanager

import pytest
import torch
from data_zoo import loader_of as any_loader_of
from torch.utils.data import TensorDataset, get_worker_info

from pardata.data._placement import Placement, _side_stream, moved
from pardata.data._plan import Fetched


def loader_of(transform, **options):
    return any_loader_of(7, 3, batch_transform=transform, **options)


# --- batch_transform ---


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_is_applied_to_each_batch_in_the_process_of_the_loop(workers):
    seen = []

    def transform(batch):
        seen.append((os.getpid(), get_worker_info(), batch.tolist()))
        return batch * 2

    loader = loader_of(transform, num_workers=workers)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 2, 4], [6, 8, 10], [12]]
    here = os.getpid()
    assert seen == 2 * [(here, None, [0, 1, 2]), (here, None, [3, 4, 5]), (here, None, [6])]


def test_a_transform_gets_each_batch_or_microbatch_on_the_device_and_may_return_anything():
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
def test_an_error_in_a_transform_is_raised_as_it_is_at_its_step(workers, options):
    loader = loader_of(fails_at_the_second, num_workers=workers, **options)
    batches = iter(loader)
    next(batches)
    with pytest.raises(Torn):
        next(batches)
    del batches
    assert loader.state_dict()["delivered"] == 3  # what the loop never got does not count
    assert loader.epoch == 1
    assert len(next(iter(loader))) in (2, 3)


def test_an_error_in_a_transform_leaves_the_generators_alone():
    def draws_and_fails(batch):
        torch.rand(len(batch))
        raise Torn

    state = torch.get_rng_state()
    with pytest.raises(Torn):
        list(loader_of(draws_and_fails, microbatch_size=2))
    assert torch.equal(torch.get_rng_state(), state)


# --- pinned memory ---


class Pinnable:
    def pin_memory(self):
        return "pinned"


@pytest.mark.parametrize("pin_memory", [True, False])
def test_without_workers_what_is_on_the_cpu_is_pinned_and_what_is_not_stays(
    pin_memory, monkeypatch
):
    # Of a machine that has a GPU; the meta device stands for it.
    asked = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)  # so data stay where they are
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: asked.append(tensor) or tensor)
    data = TensorDataset(torch.arange(7), torch.empty(7, device="meta"))
    loader = any_loader_of(data, 3, pin_memory=pin_memory, device=None)
    assert [(x.tolist(), len(y), y.device.type) for x, y in loader] == [
        ([0, 1, 2], 3, "meta"),
        ([3, 4, 5], 3, "meta"),
        ([6], 1, "meta"),
    ]
    assert [tensor.tolist() for tensor in asked] == ([[0, 1, 2], [3, 4, 5], [6]] * pin_memory)
    own = Pinnable()
    options = {"collate_fn": lambda _: {"own": [own, "text"]}, "device": None}
    (batch,) = any_loader_of(1, 1, pin_memory=pin_memory, **options)
    assert batch == {"own": ["pinned" if pin_memory else own, "text"]}


# --- running ahead ---


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_on_a_cpu_nothing_runs_ahead(prefetch):
    seen = []
    loader = loader_of(lambda batch: seen.append(len(batch)) or batch, prefetch=prefetch)
    for step, batch in enumerate(loader):
        assert len(seen) == step + 1
        assert batch.tolist() == [*range(7)][3 * step : 3 * step + 3]


class Gpu:
    """Takes down what is asked of streams and tensors, where there is no GPU to ask."""

    def __init__(self):
        self.log, self.current, self.streams = [], "loop", 0

    def new_stream(self, _device):
        self.streams += 1
        return FakeStream(self, "side")

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def draw(self, count):
        """Yield what a dataset reads, and note on which stream."""
        for number in range(1, count + 1):
            self.log.append(f"{self.current} reads {number}")
            yield torch.tensor(number)

    def make(self, fetched):
        """Return the batch, with its number, and note on which stream it was made."""
        (number,) = map(int, fetched.batches)
        self.log.append(f"{self.current} makes {number}")
        return number, {"x": [OnGpu.of(self, number), torch.zeros(1), "text"]}


class FakeStream:
    def __init__(self, gpu, name):
        self.gpu, self.name, self.events = gpu, name, 0

    def wait_stream(self, other):
        self.gpu.log.append(f"{self.name} waits for all of {other.name}")

    def record_event(self):
        self.events += 1
        return f"the end of {self.events}"

    def wait_event(self, event):
        self.gpu.log.append(f"{self.name} waits for {event}")


class OnGpu(torch.Tensor):
    is_cpu = False

    @classmethod
    def of(cls, gpu, number):
        tensor = torch.zeros(1).as_subclass(cls)
        tensor.gpu, tensor.number = gpu, number
        return tensor


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Stream", gpu.new_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: FakeStream(gpu, gpu.current))
    monkeypatch.setattr(torch.cuda, "stream", gpu.stream)
    _side_stream.cache_clear()
    yield gpu
    _side_stream.cache_clear()


def ahead(read, prefetch, make=lambda fetched: fetched.batches[0]):
    placement = Placement(torch.device("cuda"), None, None, prefetch)
    return placement.ahead((Fetched(None, [each]) for each in read), make)


def test_on_a_gpu_the_next_batch_is_made_on_another_stream_and_each_waited_for(gpu):
    batches = ahead(gpu.draw(3), 1, gpu.make)
    assert gpu.log == []
    assert next(batches)[0] == 1
    assert gpu.log == [
        "loop reads 1",
        "side waits for all of loop",
        "side makes 1",
        "loop reads 2",
        "side waits for all of loop",
        "side makes 2",
        "loop waits for the end of 1",
    ]
    gpu.log.clear()
    gpu.current = "the user's own"  # the one on which the loop asks
    assert [number for number, _ in batches] == [2, 3]
    assert gpu.log == [
        "the user's own reads 3",
        "side waits for all of the user's own",
        "side makes 3",
        "the user's own waits for the end of 2",
        "the user's own waits for the end of 3",
    ]


@pytest.mark.parametrize("prefetch", [1, 3])
def test_what_was_made_before_an_error_is_delivered_before_it_is_raised(prefetch, gpu):
    def fails_at_the_third():
        yield from gpu.draw(2)
        raise Torn

    batches = ahead(fails_at_the_third(), prefetch, gpu.make)
    assert [next(batches)[0], next(batches)[0]] == [1, 2]
    with pytest.raises(Torn):
        next(batches)


class Opaque:
    """Holds what nobody finds."""

    __slots__ = ()


@pytest.mark.parametrize("found", [True, False])
def test_what_a_dataset_reads_on_a_gpu_is_waited_for_and_kept_until_its_batch_is_made(found, gpu):
    read = [OnGpu.of(gpu, 1), OnGpu.of(gpu, 2)] if found else [Opaque(), Opaque()]
    alive = [weakref.ref(each) for each in read] if found else []
    batches = ahead((read.pop(0) for _ in range(2)), 1, lambda _: torch.zeros(1))
    next(batches)
    assert gpu.log.count("side waits for all of loop") == 2
    assert [each() is None for each in alive] == [True, False] * found


def test_all_epochs_run_so_many_batches_ahead_on_one_stream_of_a_gpu(gpu):
    # The allocator keeps free memory by stream, and of streams there are 32.
    for prefetch in (1, 2, 5):
        gpu.log.clear()
        for number, _ in ahead(gpu.draw(4), prefetch, gpu.make):
            made = sum("makes" in line for line in gpu.log)
            assert made == min(number + prefetch, 4)
    assert gpu.streams == 1


@pytest.mark.parametrize(("device", "waits"), [("cuda", False), ("mps", True), ("xpu", False)])
def test_only_a_copy_to_a_device_with_streams_is_not_waited_for(device, waits, monkeypatch):
    # On mps a copy that nobody waits for reads what is gone: pytorch/pytorch#139550.
    def to(_, where, *, non_blocking):
        return where, non_blocking

    monkeypatch.setattr(torch.Tensor, "to", to)
    device = torch.device(device)
    assert moved([torch.ones(1)], device) == [(device, not waits)]

"""Batches that are copied and transformed ahead on a GPU: nothing is read early or written over.

Run with ``pytest -m gpu`` on a machine with a GPU, or with ``--device=sim``. Streams are kept busy
by a kernel that spins, so that what happens in the wrong order is seen every time: mutations.py
takes each wait out. With ``--device=cpu`` nothing spins and nothing runs ahead: that shows that the
tests run.
"""

import contextlib
import gc
import os
import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from common_gpu import SPIN, nothing_waits
from torch.utils.data import Dataset, TensorDataset

from pardata import make_loader

IN_ORDER = ["CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING"]
pytestmark = pytest.mark.skipif(
    any(os.environ.get(name, "0") != "0" for name in IN_ORDER),
    reason=f"{' or '.join(IN_ORDER)} is set, under which nothing happens in the wrong order",
)

# Or the GPU and ``torch.cuda``, once the module's fixture has run.
HERE = SimpleNamespace(device=torch.device("cpu"), own=torch.cpu)
STEPS, ROWS, WIDTH = 8, 4, 72_000  # 1.15 MB a batch, of which the allocator puts 17 in a block


def numbered(start):
    """Return data of which every number in step k is `start` + k."""
    values = torch.arange(STEPS, dtype=torch.float32).repeat_interleave(ROWS) + start
    return TensorDataset(values[:, None].expand(-1, WIDTH).contiguous())


@pytest.fixture(autouse=True, scope="module")
def _warm(device):
    """Take all the memory and load all the kernels that are needed.

    Either may wait for the whole device, and so put in order by chance what a test wants to see
    out of order.
    """
    HERE.device, HERE.own = torch.device(device), torch.get_device_module(device)
    if HERE.device.type == "cpu":
        return
    own = HERE.own
    own.set_device(HERE.device)
    pinned = [torch.empty(ROWS, WIDTH, pin_memory=True) for _ in range(2 * STEPS)]
    del pinned
    for stream in [own.Stream(HERE.device) for _ in range(32)]:  # as many as there are
        with own.stream(stream):
            batches = [torch.empty(ROWS, WIDTH, device=HERE.device) for _ in range(2 * STEPS)]
            del batches
    for options in ({"batch_transform": slowly}, *NESTED.values()):
        extremes(loader_of(0, 0, **options), busy=True)
    torch.full((), 0.0, device=HERE.device).fill_(1.0) + torch.ones(ROWS, WIDTH, device=HERE.device)
    own.synchronize()


@pytest.fixture(autouse=True)
def _idle(_warm):
    """Begin with nothing queued: a stream that is busy with the test before would be late."""
    if HERE.device.type != "cpu":
        HERE.own.synchronize()


def spin():
    """Keep the stream of now busy for a while."""
    if HERE.device.type != "cpu":
        HERE.own._sleep(SPIN)


def loader_of(start, prefetch, **options):
    return make_loader(
        numbered(start),
        ROWS,
        device=HERE.device,
        prefetch=prefetch,
        num_workers=0,
        seed=1,
        **options,
    )


@dataclass(slots=True)
class Slotted:
    """A batch in which nothing finds a tensor but who knows it."""

    inside: torch.Tensor


def tensor_in(batch):
    """Return the one tensor of a batch, however deep in it."""
    while not isinstance(batch, torch.Tensor):
        batch = batch.inside if isinstance(batch, Slotted) else batch[0]
    return batch


def extremes(loader, *, busy):
    """Return, for each batch, the least and the greatest number that the loop found in it.

    The loop's stream does nothing for a while before it reads, and meanwhile the batch is let go.
    """
    found = []
    for batch in loader:
        if busy:
            spin()
        tensor = tensor_in(batch)
        assert tensor.device == HERE.device
        found.append(torch.stack([tensor.min(), tensor.max()]))
        del batch, tensor
    return [tuple(pair.tolist()) for pair in found]


def expected(start):
    return [(float(start + step),) * 2 for step in range(STEPS)]


def slowly(batch):
    """Return a copy of the batch that is finished late, and NaN until then."""
    inputs = tensor_in(batch)
    result = torch.full_like(inputs, float("nan"))
    spin()
    return result.copy_(inputs)


# --- a batch is finished before the loop reads it ---


def holding_up(batch):
    """Return the batch as it is, and let the copy of the next one wait for a while."""
    spin()
    return batch


SLOW = {"transform": slowly, "copy": holding_up}


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("slow", SLOW)
def test_the_loop_reads_a_batch_only_once_it_is_there(slow, prefetch):
    loader = loader_of(100, prefetch, batch_transform=SLOW[slow])
    assert extremes(loader, busy=False) == expected(100)


# --- what a transform uses is finished before it does ---


def after_a_while(value):
    """Return a number that is written late on the stream of now, and NaN until then."""
    late = torch.full((), float("nan"), device=HERE.device)
    late.isnan().item()  # so it is there
    spin()
    return late.fill_(value)


def shifted_from_the_start(start):
    loader, late = loader_of(start, 1, batch_transform=lambda batch: batch[0] + late), None
    late = after_a_while(5.0)
    return extremes(loader, busy=False)


def test_a_transform_uses_what_was_in_the_making_when_the_epoch_began():
    assert shifted_from_the_start(400) == expected(405)


# --- a batch is not written over before the loop has read it ---


NESTED = {
    "list": {},
    "slots": {"batch_transform": lambda batch: Slotted(batch[0])},
    "microbatches": {"microbatch_size": ROWS},
}


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("kind", NESTED)
def test_prefetching_does_not_reuse_memory_that_the_loop_still_reads(kind, prefetch):
    loader = loader_of(600, prefetch, **NESTED[kind])
    assert extremes(loader, busy=True) == expected(600)


def test_epoch_after_epoch_and_after_a_break():
    loader = loader_of(800, 2)
    for _ in range(2):
        for batch in loader:
            spin()
            first = batch[0].max()
            del batch
            break
        assert extremes(loader, busy=True) == expected(800)
        assert first.item() == 800.0


# --- the same as without ---


class Drawing(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return torch.rand(3) + index, {"y": index + random.random(), "name": f"n{index}"}


def noisy(batch):
    x, rest = batch
    return {"x": x + torch.rand(x.shape, device=x.device), "on cpu": torch.rand(2), **rest}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_it_changes_nothing_in_what_the_loop_gets(workers):
    found = []
    for prefetch in (0, 1, 4):
        loader = make_loader(
            Drawing(),
            5,
            shuffle=True,
            drop_last=False,
            microbatch_size=2,
            batch_transform=noisy,
            prefetch=prefetch,
            num_workers=workers,
            seed=2,
            device=HERE.device,
        )
        parts = [part for _ in range(2) for batch in loader for part in batch]
        assert {part["x"].device for part in parts} == {HERE.device}
        assert {part["on cpu"].device.type for part in parts} == {"cpu"}
        found.append([(p["x"].tolist(), p["on cpu"].tolist(), p["y"].tolist()) for p in parts])
        assert len(found[-1]) == 2 * 14
    assert found[0] == found[1] == found[2]


def test_the_generator_of_the_gpu_is_left_to_the_model():
    torch.manual_seed(7)  # of all devices
    alone = [torch.rand(2, device=HERE.device).tolist() for _ in range(5)]
    torch.manual_seed(7)  # of all devices
    loader = make_loader(
        Drawing(), 5, microbatch_size=2, batch_transform=noisy, num_workers=0, device=HERE.device
    )
    assert [torch.rand(2, device=HERE.device).tolist() for _ in loader] == alone


def test_a_transform_that_draws_on_the_gpu_for_a_share_raises():
    def draws(batch):
        return batch[0] + torch.rand(1, device=HERE.device)

    with pytest.raises(RuntimeError, match="`batch_transform` must draw no random numbers: pass"):
        next(iter(loader_of(0, 1, batch_transform=draws)))


def test_what_was_copied_ahead_is_not_delivered():
    loader = loader_of(0, 3)
    batches = iter(loader)
    next(batches)
    assert loader.state_dict()["delivered"] == ROWS
    assert loader.stats()["samples"] == ROWS
    later = loader_of(0, 3)
    later.load_state_dict(loader.state_dict())
    assert extremes(later, busy=False) == expected(0)[1:]


class Batch:
    """Takes down where it is when it is moved."""

    were_pinned = []  # noqa: RUF012  # of all

    def __init__(self, samples):
        self.tensor = torch.tensor(samples)

    def pin_memory(self):
        self.tensor = self.tensor.pin_memory()
        return self

    def to(self, device):
        self.were_pinned.append(self.tensor.is_pinned())
        self.tensor = self.tensor.to(device, non_blocking=True)
        return self


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_batches_are_pinned_for_the_copy_unless_told_not_to(workers, gpu):
    Batch.were_pinned.clear()
    for told in (None, False):
        options = {"collate_fn": Batch, "num_workers": workers, "pin_memory": told}
        loader = make_loader(range(4), 2, device=HERE.device, **options)
        assert [batch.tensor.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert Batch.were_pinned == [True, True, False, False]


# --- data that is on the GPU already


def test_rows_of_tensors_on_the_gpu_are_read_there():
    data = TensorDataset(torch.arange(10, device=HERE.device), torch.arange(10))
    # Without a number it is the current one.
    for on_gpu, on_cpu in make_loader(data, 4, shuffle=True, seed=1, device=HERE.device.type):
        assert on_gpu.device == on_cpu.device == HERE.device
        assert torch.equal(on_gpu.cpu(), on_cpu.cpu())


def test_nothing_waits_for_them():
    loader = make_loader(
        TensorDataset(torch.arange(10, device=HERE.device)), 4, shuffle=True, seed=1
    )
    assert len(list(loader)) == 2
    with nothing_waits(HERE.device):
        assert len(list(loader)) == 2


def test_an_index_out_of_range_leaves_the_gpu_usable(gpu):
    data = TensorDataset(torch.arange(10, device=HERE.device))
    with pytest.raises(RuntimeError, match="index 99 is out of range for 10 samples"):
        list(make_loader(data, 2, sampler=[0, 99]))
    assert torch.ones(1, device=HERE.device).item() == 1


# --- for as long as the loop keeps them


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_that_are_kept_beyond_the_step_stay_what_they_are(prefetch):
    loader = loader_of(900, prefetch, batch_transform=slowly)
    kept = [tensor_in(batch) for batch in loader]
    spin()
    for _ in loader:  # takes memory, and gives it back
        spin()
    assert [(x.min().item(), x.max().item()) for x in kept] == expected(900)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_memory_does_not_grow_with_the_steps_that_the_host_is_ahead(prefetch, gpu):
    steps, rows, megabytes = 16, 4, 16  # the allocator rounds smaller ones up to 20
    data = TensorDataset(torch.zeros(steps * rows, megabytes * 2**20 // 4 // rows))
    HERE.own.synchronize()
    HERE.own.empty_cache()
    before = peak = HERE.own.memory_reserved()
    loader = make_loader(
        data, rows, device=HERE.device, prefetch=prefetch, num_workers=0, pin_memory=False
    )
    for batch in loader:
        spin()
        batch[0].sum()
        del batch
        peak = max(peak, HERE.own.memory_reserved())
    assert peak - before <= (prefetch + 2) * megabytes * 2**20


def used():
    """Return how much of the GPU's memory is in use, once nothing is queued."""
    gc.collect()
    HERE.own.synchronize()
    return HERE.own.memory_allocated()


@pytest.mark.parametrize("leaving", ["break", "error"])
def test_a_loop_that_is_left_early_leaves_no_memory_in_use(leaving, gpu):
    loader = loader_of(1000, 3, batch_transform=slowly)
    assert extremes(loader, busy=True) == expected(1000)
    before = used()
    for _ in range(3):
        with contextlib.suppress(ZeroDivisionError):
            for batch in loader:
                spin()
                del batch
                if leaving == "break":
                    break
                1 / 0  # noqa: B018  # raises
        assert used() == before
    assert extremes(loader, busy=True) == expected(1000)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_exception_in_a_transform_is_raised_at_its_step(prefetch):
    calls = []

    def failing(batch):
        calls.append(len(calls))
        if len(calls) == 4:
            raise ValueError("the fourth")
        return slowly(batch)

    loader, found = loader_of(1100, prefetch, batch_transform=failing), []
    with pytest.raises(RuntimeError, match="the fourth"):  # noqa: PT012  # of which step
        for batch in loader:
            spin()
            found.append(torch.stack([batch.min(), batch.max()]))
            del batch
    assert [tuple(pair.tolist()) for pair in found] == expected(1100)[:3]
    assert extremes(loader, busy=True) == expected(1100)


# --- what they are copied from


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_pinned_memory_is_used_again_only_once_its_copy_has_read_it(workers, prefetch):
    loader = make_loader(
        numbered(1200),
        ROWS,
        device=HERE.device,
        prefetch=prefetch,
        num_workers=workers,
        batch_transform=holding_up,
    )
    for _ in range(2):
        assert extremes(loader, busy=True) == expected(1200)


class Queue(Dataset):
    """Rows on the GPU, of which each batch is written anew, late, just before it is read."""

    def __init__(self, start):
        self.start = start

    def __len__(self):
        return STEPS * ROWS

    def __getitems__(self, indices):
        rows = torch.full((len(indices), WIDTH), float("nan"), device=HERE.device)
        spin()
        return [*rows.fill_(self.start + indices[0] // ROWS)]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_transform_reads_what_a_dataset_has_just_written_on_the_gpu(prefetch):
    options = {"device": HERE.device, "prefetch": prefetch, "num_workers": 0}
    loader = make_loader(Queue(1300), ROWS, batch_transform=lambda x: x + 1, **options)
    assert extremes(loader, busy=False) == expected(1301)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_prefetching_does_not_overwrite_rows_that_the_transform_reads(prefetch):
    rows = TensorDataset(numbered(1400).tensors[0].to(HERE.device))
    loader = make_loader(
        rows, ROWS, device=HERE.device, prefetch=prefetch, batch_transform=slowly, seed=1
    )
    assert extremes(loader, busy=False) == expected(1400)


# --- where it runs


def streams_of(prefetch):
    """Return the streams on which the transforms of two epochs of two loaders run, each once."""
    seen = []

    def looking(batch):
        seen.append(HERE.own.current_stream())
        return batch

    for loader in [loader_of(0, prefetch, batch_transform=looking) for _ in range(2)]:
        for _ in range(2):
            list(loader)
    return {stream.stream_id for stream in seen}


def test_prefetching_uses_one_stream_other_than_the_current_one(gpu):
    own = HERE.own.current_stream().stream_id
    assert streams_of(0) == {own}
    assert len(streams_of(1)) == 1
    assert own not in streams_of(1)
    assert streams_of(1) == streams_of(3)

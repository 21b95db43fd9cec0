"""make_loader: its arguments, and what a bad one gets, on every rank."""

import gc
import json
import multiprocessing
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common_data import ByLength, Count, Numbers, Sized, flat
from logged import log_of
from on_ranks import run
from torch.utils.data import (
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    get_worker_info,
)

from pardata import Loader, backward, make_loader, wrap_model


class WhoAmI(Numbers):
    """Tells under which seed its worker reads."""

    def __getitem__(self, index):
        return get_worker_info().seed


def batches(*args, **options):
    return [batch.tolist() for batch in make_loader(*args, **{"num_workers": 0, **options})]


# --- datasets ---


DATASETS = [range(5), Subset(range(10), [0, 1, 2, 3, 4]), Count(5), Sized(5)]


@pytest.mark.parametrize("dataset", DATASETS)
def test_map_style_and_iterable_datasets_make_a_loader(dataset):
    loader = make_loader(dataset, 2, num_workers=0)
    assert isinstance(loader, Loader)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert loader.dataset is dataset
    assert loader.batch_size == 2
    assert type(dataset) is Count or len(loader) == 3


# --- the last batch; what else is refused: tests/promises/misuse_data.py ---


def test_only_a_shuffled_loader_drops_an_incomplete_batch_unless_told():
    order = SequentialSampler(range(40))
    assert sum(map(len, make_loader(range(40), 32, num_workers=0, sampler=order))) == 40
    assert sum(map(len, make_loader(range(40), 32, num_workers=0))) == 40
    assert sum(map(len, make_loader(range(40), 32, num_workers=0, shuffle=True))) == 32


# --- distributed ---


def _distributed():
    found = [batches(range(4), 4, distributed=value) for value in ("auto", True, False)]
    # Without, no rank waits for another: only one of them makes a loader, of other arguments.
    own = dist.get_rank() and batches(range(3), 2, distributed=False)
    return [*found, own]


def test_distributed_says_whether_the_ranks_share():
    whole = [[0, 1, 2, 3]]
    first, second = run(_distributed, world_size=2)
    assert first == [[[0, 1]], [[0, 1]], whole, 0]
    assert second == [[[2, 3]], [[2, 3]], whole, [[0, 1], [2]]]
    alone = [batches(range(4), 4, distributed=value) for value in ("auto", False)]
    assert alone == [whole, whole]


# --- the seed ---


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 + 1])
def test_any_integer_is_a_seed(seed):
    assert sorted(flat(batches(range(8), 4, shuffle=True, seed=seed))) == [*range(8)]


# --- shares that differ ---


UNEVEN = {
    "shuffled": (8, {"shuffle": True}),
    "in the order of a sampler": (8, {"sampler": SequentialSampler(range(24))}),
}
EVEN = {
    "an evaluation": (8, {}),
    "a multiple of the ranks": (9, {"shuffle": True}),
    "microbatches": (8, {"shuffle": True, "microbatch_size": 2}),
}


def _warnings_of_training(strategy, arguments):
    """What is logged in steps of `backward`, in evaluations, and then in steps without it."""
    model, rows = wrap_model(torch.nn.Linear(1, 1), strategy), torch.ones(3, 1)
    with log_of("pardata.data._batch") as log:
        for batch_size, options in arguments:
            loader = make_loader(torch.ones(24, 1), batch_size, num_workers=0, **options)
            for batch in loader:
                backward(model, lambda model, rows: model(rows).sum(), batch)
            with torch.no_grad():
                model(rows)
        model.eval()(rows)
        before = [*log.lines]
        for _ in range(2):
            model.train()(rows).sum().backward()
    return before, log.lines


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_uneven_shares_are_warned_about_once_where_backward_does_not_weight_them(strategy):
    text = (
        "[0/3] `batch_size` 8 leaves 3 ranks unequal local batches: call "
        "`pardata.backward`, which weights them, or pass a multiple of 3 and no `cost`"
    )
    for arguments in UNEVEN.values():
        found = run(_warnings_of_training, strategy, [arguments], world_size=3)
        assert found == [([], [text]), ([], []), ([], [])]
        assert run(_warnings_of_training, strategy, [arguments], world_size=2) == [([], [])] * 2
    found = run(_warnings_of_training, strategy, [*EVEN.values()], world_size=3)
    assert found == [([], [])] * 3


def _warnings_of(arguments):
    with log_of("pardata.data._config") as log:
        for batch_size, options in arguments:
            for _ in range(2):
                make_loader(range(24), batch_size, num_workers=0, **options)
    return log.lines


def test_ranks_that_will_idle_are_named_once_on_rank_0():
    arguments = [(8, {"microbatch_size": 4}), (8, {"microbatch_size": 7}), (9, {})]
    text = "[0/3] `microbatch_size` {} leaves rank(s) 2 idle: lower it"
    found = run(_warnings_of, arguments, world_size=3)
    assert found == [[text.format(4), text.format(7)], [], []]
    enough = [(8, {"microbatch_size": 3}), (9, {"microbatch_size": 3})]
    assert run(_warnings_of, enough, world_size=3) == [[], [], []]


# --- what is DataLoader's own ---


def _note_worker(worker):
    get_worker_info().dataset[0] = 100 + worker


def _note_worker_in_a_tensor(worker):
    get_worker_info().dataset.tensors = (torch.tensor([100 + worker, 1, 2, 3]),)


def test_worker_init_fn_runs_in_each_worker_and_reaches_the_data_set():
    data = [0, 1, 2, 3]
    found = batches(data, 1, num_workers=2, worker_init_fn=_note_worker)
    assert found == [[100], [1], [2], [3]]
    assert data == [0, 1, 2, 3]
    # Also where it is read by whole batches.
    whole = TensorDataset(torch.arange(4))
    loader = make_loader(whole, 1, num_workers=1, worker_init_fn=_note_worker_in_a_tensor)
    assert [numbers.tolist() for (numbers,) in loader] == [[100], [1], [2], [3]]


def inside(loader):
    return SimpleNamespace(**loader._source._options)


def test_arguments_are_handed_on():
    handed = {
        "num_workers": 1,
        "timeout": 7.5,
        "prefetch_factor": 3,
        "multiprocessing_context": multiprocessing.get_context("spawn"),
        "persistent_workers": True,
        "worker_init_fn": _note_worker,
        "pin_memory": False,
    }
    loader = inside(make_loader(range(4), 2, **handed))
    assert {name: getattr(loader, name) for name in handed} == handed
    assert inside(make_loader(range(4), 2, num_workers=1)).persistent_workers is False


@pytest.mark.filterwarnings("ignore:'pin_memory'")  # newer PyTorch warns where there is no GPU
def test_what_is_for_workers_goes_with_auto_where_that_finds_none():
    data = TensorDataset(torch.arange(4))
    loader = make_loader(data, 2, timeout=30, prefetch_factor=3, pin_memory=True)
    assert [batch.tolist() for (batch,) in loader] == [[0, 1], [2, 3]]
    assert inside(make_loader(range(4), 2, num_workers=1, timeout=30)).timeout == 30


def _worker_seeds():
    loader = make_loader(WhoAmI(8), 8, num_workers=1, seed=3)
    return [int(seeds[0]) for _ in range(2) for seeds in loader]


def test_worker_seeds_differ_between_ranks_and_repeat_between_runs():
    one, other = run(_worker_seeds, world_size=2)
    assert one[0] != other[0]
    assert run(_worker_seeds, world_size=2) == [one, other]


# --- samplers ---


def test_a_sampler_that_is_refused_leaves_no_workers_half_made(monkeypatch):
    ignored = []  # "Exception ignored in …", by PyTorch's iterator of workers
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    own = RandomSampler(range(9), generator=torch.Generator().manual_seed(0))
    loader = make_loader(range(9), 3, sampler=own, num_workers=1)
    with pytest.raises(ValueError, match="must yield the same order each time in epoch 0"):
        next(iter(loader))
    del loader
    gc.collect()
    assert ignored == []


class Told(Numbers):
    """Reads by its epoch, which it is told."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return 10 * self.epoch + index


class ToldItems(Told):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Told, ToldItems])
def test_a_dataset_is_told_the_epoch_wherever_it_is_read(kind, workers):
    loader = make_loader(kind(4), 3, num_workers=workers, seed=1)
    found = [flat(batch.tolist() for batch in loader) for _ in range(2)]
    loader.set_epoch(5)
    found.append(flat(batch.tolist() for batch in loader))
    assert found == [[0, 1, 2, 3], [10, 11, 12, 13], [50, 51, 52, 53]]


def test_numbers_of_numpy_are_numbers():
    loader = make_loader(range(9), np.int64(4), microbatch_size=np.int32(2), seed=np.uint8(3))
    loader.set_epoch(np.int64(1))
    assert [batch.counts for batch in loader] == [(2, 2), (2, 2), (1,)]
    assert json.loads(json.dumps(loader.state_dict())) == loader.state_dict()
    assert list(loader.epochs(np.int64(3))) == [2]


# --- batch samplers: the global batches ---


def test_a_batch_sampler_sets_the_length_and_no_batch_size():
    loader = make_loader(range(28), batch_sampler=[[1, 2], [3]], num_workers=0)
    assert (len(loader), loader.batch_size) == (2, None)
    with pytest.raises(
        TypeError, match="the batch_sampler must have a __len__, but ByLength has none"
    ):
        len(make_loader(range(28), batch_sampler=ByLength(28, 20)))


ORDERS = [
    ("batch_sampler", {}, [[1, 2], [3], [4, 5]], [[1, 2], [4], [3, 5]]),
    ("sampler", {"batch_size": 2}, [1, 2, 3, 4], [1, 2, 4, 3]),
]


@pytest.mark.parametrize(("argument", "options", "one", "other"), ORDERS)
def test_resuming_an_epoch_with_another_order_raises(argument, options, one, other):
    def loader(order):
        return make_loader(range(9), num_workers=0, **{argument: order}, **options)

    begun, again = loader(one), loader(other)
    next(iter(begun))
    again.load_state_dict(begun.state_dict())
    with pytest.raises(ValueError, match=f"epoch 0 must have .* make `{argument}` as then"):
        next(iter(again))


def test_a_place_inside_a_batch_of_a_batch_sampler_is_none():
    loader = make_loader(range(9), num_workers=0, batch_sampler=[[1, 2], [3]])
    loader.load_state_dict({**loader.state_dict(), "delivered": 1})
    with pytest.raises(ValueError, match="must have the order of `state`: make `batch_sampler`"):
        next(iter(loader))

"""make_loader: its arguments, and what a bad one gets, on every rank."""

import logging
import multiprocessing
import os
import re

import pytest
import torch
import torch.distributed as dist
from on_ranks import Raised, caught, run, run_caught
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from pardata import Loader, make_loader


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class SizedStream(Stream):
    def __len__(self):
        return 10


class Lengthless(Dataset):
    def __getitem__(self, index):
        return index


class Broken(Dataset):
    def __getitem__(self, index):
        return index

    def __len__(self):
        msg = "the index file is missing"
        raise OSError(msg)


class NoLength(Sampler):
    def __iter__(self):
        return iter(range(10))


class WhoAmI(Dataset):
    """Tells which process reads, and under which seed."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        info = get_worker_info()
        return index, os.getpid(), -1 if info is None else info.seed


def flat(lists):
    return [item for part in lists for item in part]


def batches(*args, **options):
    return [batch.tolist() for batch in make_loader(*args, **options)]


# --- data sets ---


@pytest.mark.parametrize(
    "dataset",
    [
        list(range(5)),
        range(5),
        tuple(range(5)),
        Subset(range(10), [0, 1, 2, 3, 4]),
        ConcatDataset([[0, 1], [2, 3, 4]]),
    ],
)
def test_anything_with_items_and_a_length_is_a_data_set(dataset):
    loader = make_loader(dataset, 2, num_workers=0)
    assert isinstance(loader, Loader)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert loader.dataset is dataset
    assert loader.batch_size == 2
    assert len(loader) == 3


def test_a_tensor_dataset_and_a_subset_of_it_give_tensors():
    data = TensorDataset(torch.arange(4), torch.arange(4.0))
    assert [(x.tolist(), y.tolist()) for x, y in make_loader(data, 4)] == [([0, 1, 2, 3],) * 2]
    ((x, _),) = make_loader(Subset(data, [3, 1]), 2)
    assert x.tolist() == [3, 1]


@pytest.mark.parametrize(("dataset", "length"), [(Stream(), None), (SizedStream(), 3)])
def test_a_stream_is_a_data_set_too_and_counts_its_steps_if_it_has_a_length(dataset, length):
    loader = make_loader(dataset, 4, num_workers=0)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert loader.dataset is dataset
    assert length is None or len(loader) == length


def test_an_empty_data_set_has_no_step():
    loader = make_loader([], 2, num_workers=0)
    assert len(loader) == 0
    assert list(loader) == []
    assert loader.epoch == 1


# --- drop_last ---


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 3),
        ({"shuffle": True}, 2),
        ({"sampler": SequentialSampler(range(5))}, 2),
        ({"drop_last": True}, 2),
        ({"shuffle": True, "drop_last": False}, 3),
        ({"drop_last": False}, 3),
    ],
)
def test_training_drops_the_incomplete_batch_and_evaluation_keeps_it(options, steps):
    loader = make_loader(range(5), 2, num_workers=0, **options)
    assert len(loader) == len(list(loader)) == steps


# --- bad arguments, alone and on every rank ---

CASES = {
    "shuffled stream": (
        (Stream(), 2, {"shuffle": True}),
        "ValueError",
        (
            "`shuffle` and `sampler` must be left out for an IterableDataset, whose order is its "
            "own, but are given for Stream: shuffle inside the data set"
        ),
    ),
    "sampled stream": (
        (Stream(), 2, {"sampler": SequentialSampler(range(10))}),
        "ValueError",
        "must be left out for an IterableDataset",
    ),
    "no length": (
        (Lengthless(), 2, {}),
        "TypeError",
        (
            "`dataset` must have __getitem__ and __len__, or be an IterableDataset, but Lengthless "
            "is neither: write a map-style data set, whose samples have numbers that can be shared "
            "out"
        ),
    ),
    "no items": (({1, 2}, 2, {}), "TypeError", "but set is neither: write"),
    "an iterator": ((iter([1, 2]), 2, {}), "TypeError", "but list_iterator is neither: write"),
    "sharded items": (
        (range(10), 4, {"sharded": True}),
        "ValueError",
        (
            "`sharded` must be False for a data set that has indices, which are shared out here, "
            "but is True for range: leave it out"
        ),
    ),
    "broken length": ((Broken(), 2, {}), "OSError", "the index file is missing"),
    "DistributedSampler": (
        (range(10), 4, {"sampler": DistributedSampler(range(10), num_replicas=2, rank=0)}),
        "ValueError",
        (
            "`sampler` must yield the order of the whole data set, but is a DistributedSampler, "
            "which yields one rank's part: leave it out and pass shuffle=True"
        ),
    ),
    "sampler without length": (
        (range(10), 4, {"sampler": NoLength()}),
        "TypeError",
        "`sampler` must have a length, but NoLength has none: give it __len__",
    ),
    "sampler and shuffle": (
        (range(10), 4, {"sampler": SequentialSampler(range(10)), "shuffle": True}),
        "ValueError",
        "`shuffle` must be False with a `sampler`, which is the order, but is True: choose one",
    ),
    "batch size of text": (
        (range(10), "4", {}),
        "TypeError",
        "`batch_size` must be an integer, but is '4'",
    ),
    "batch size of a float": ((range(10), 4.0, {}), "TypeError", "but is 4.0"),
    "batch size of a bool": ((range(10), True, {}), "TypeError", "but is True"),
    "no batch size": ((range(10), None, {}), "TypeError", "but is None"),
    "batch size larger than a stream that drops its tail": (
        (SizedStream(), 11, {"drop_last": True}),
        "ValueError",
        "`batch_size` must be at most the 10 samples of the data set",
    ),
    "microbatch size of text": (
        (range(10), 4, {"microbatch_size": "2"}),
        "TypeError",
        "`microbatch_size` must be an integer, but is '2'",
    ),
    "microbatch size of a bool": (
        (range(10), 4, {"microbatch_size": True}),
        "TypeError",
        "`microbatch_size` must be an integer, but is True",
    ),
    "microbatches of nothing": (
        (range(10), 4, {"microbatch_size": 0}),
        "ValueError",
        "`microbatch_size` must be at least 1",
    ),
    "microbatches larger than the batch": (
        (range(10), 4, {"microbatch_size": 5}),
        "ValueError",
        (
            "`microbatch_size` must be at most the `batch_size` of 4, of which it is a piece, but "
            "is 5: make it smaller"
        ),
    ),
    "microbatches of sharded streams": (
        (Stream(), 4, {"sharded": True, "microbatch_size": 2}),
        "ValueError",
        (
            "`microbatch_size` must be left out with `sharded`, as the steps of such streams "
            "depend on the number of ranks, but is 2: choose one"
        ),
    ),
    "prefetch of text": (
        (range(10), 4, {"prefetch": "1"}),
        "ValueError",
        "`prefetch` must be an integer from 0 up, but is '1'",
    ),
    "prefetch below 0": ((range(10), 4, {"prefetch": -1}), "ValueError", "up, but is -1"),
    "prefetch of a bool": ((range(10), 4, {"prefetch": True}), "ValueError", "up, but is True"),
    "batch size larger than the data": (
        (range(10), 11, {"shuffle": True}),
        "ValueError",
        (
            "`batch_size` must be at most the 10 samples of the data set, as drop_last would leave "
            "no batch, but is 11: make it smaller, or pass drop_last=False"
        ),
    ),
    "batch size larger than the sampler": (
        (range(10), 5, {"sampler": RandomSampler(range(10), num_samples=4, replacement=True)}),
        "ValueError",
        "at most the 4 samples of the data set",
    ),
    "seed of text": (
        (range(10), 4, {"seed": "0"}),
        "TypeError",
        "`seed` must be an integer or None, but is '0'",
    ),
    "seed of a bool": ((range(10), 4, {"seed": True}), "TypeError", "but is True"),
    "workers of text": (
        (range(10), 4, {"num_workers": "many"}),
        "ValueError",
        "`num_workers` must be 'auto' or an integer from 0 up, but is 'many'",
    ),
    "workers below 0": ((range(10), 4, {"num_workers": -1}), "ValueError", "up, but is -1"),
    "workers of a bool": ((range(10), 4, {"num_workers": True}), "ValueError", "up, but is True"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_argument_is_told_with_its_cure(name):
    (dataset, batch_size, options), kind, text = CASES[name]
    result = caught(lambda: make_loader(dataset, batch_size, **options))
    assert isinstance(result, Raised)
    assert result.type == kind
    assert text in result.text


def _one_bad_argument(failing):
    found = {}
    for name, ((dataset, batch_size, options), _, _) in CASES.items():
        if dist.get_rank() != failing:
            dataset, batch_size, options = range(10), 4, {}  # noqa: PLW2901  # a good one instead
        found[name] = caught(lambda d=dataset, b=batch_size, o=options: make_loader(d, b, **o))
    return found, batches(range(4), 4, num_workers=0)


@pytest.mark.parametrize(("size", "failing"), [(2, 1), (3, 0)])
def test_a_bad_argument_on_one_rank_is_raised_on_every_rank(size, failing):
    for rank, (found, after) in enumerate(run(_one_bad_argument, failing, world_size=size)):
        for name, (_, kind, text) in CASES.items():
            raised = found[name]
            assert isinstance(raised, Raised), (rank, name)
            assert text in raised.text
            if rank == failing:
                assert raised.type == kind
            else:
                assert raised.type == "RuntimeError"
                assert f"rank {failing} failed in `make_loader`: {kind}: " in raised.text
        assert len(after) == 1


def _too_small(batch_size):
    return make_loader(range(10), batch_size)


def _too_small_for_microbatches(batch_size):
    return make_loader(range(10), batch_size, microbatch_size=1)


@pytest.mark.parametrize(
    ("size", "batch_size", "least", "cure"),
    [
        (1, 0, 1, "pass 1 or more"),
        (1, -3, 1, "pass 1 or more"),
        (3, 2, 3, "it counts the samples of all ranks together"),
        (2, 0, 2, "it counts the samples of all ranks together"),
    ],
)
def test_a_batch_size_below_one_a_rank_is_refused(size, batch_size, least, cure):
    one_each = ", one a rank" if least > 1 else ""
    text = f"`batch_size` must be at least {least}{one_each}, but is {batch_size}: {cure}"
    for raised in run_caught(_too_small, batch_size, world_size=size):
        assert (raised.type, raised.text) == ("ValueError", text)


def test_in_microbatches_a_batch_may_be_smaller_than_the_world_and_not_of_nothing():
    for raised in run_caught(_too_small_for_microbatches, 0, world_size=3):
        assert raised.type == "ValueError"
        assert "`batch_size` must be at least 1" in raised.text
        assert raised.text.endswith("but is 0: pass 1 or more")


def _microbatches_at_the_edge():
    found = []
    # One of one, as many as the batch, and a shuffled tail smaller than the world.
    for batch_size, microbatch_size in [(1, 1), (4, 4), (4, 1)]:
        options = {"microbatch_size": microbatch_size, "shuffle": True, "drop_last": False}
        loader = make_loader(range(9), batch_size, num_workers=0, seed=0, **options)
        found.append([flat(batch.tolist() for batch in step) for step in loader])
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_sizes_of_microbatches_from_one_to_the_whole_batch_are_accepted(size):
    team = run(_microbatches_at_the_edge, world_size=size)
    alone = _microbatches_at_the_edge()
    for number, whole in enumerate(alone):
        steps = zip(*(found[number] for found in team), strict=True)
        assert [flat(shares) for shares in steps] == whole
        assert sorted(flat(whole)) == list(range(9))


def _sizes_at_the_edge():
    size = dist.get_world_size()
    found = [len(make_loader(range(10), size)), len(make_loader(range(10), 10, shuffle=True))]
    for tail in range(size + 1):
        data = range(2 * 8 + tail)
        found.append(caught(lambda d=data: len(make_loader(d, 8, shuffle=True, drop_last=False))))
        found.append(len(make_loader(data, 8)))
        sampler = SequentialSampler(data)
        with_sampler = caught(
            lambda s=sampler: len(make_loader(range(30), 8, sampler=s, drop_last=False))
        )
        assert type(with_sampler) is type(found[-2])
    return found


def test_a_shuffled_tail_smaller_than_the_world_is_refused_and_no_other():
    for found in run(_sizes_at_the_edge, world_size=3):
        assert found[:2] == [4, 1]
        shuffled, ordered = found[2::2], found[3::2]
        assert ordered == [2, 3, 3, 3]
        assert (shuffled[0], shuffled[3]) == (2, 3)
        for tail in (1, 2):
            assert shuffled[tail].type == "ValueError"
            assert shuffled[tail].text == (
                f"the last batch must have a sample for each of the 3 ranks, but has {tail} of "
                f"{16 + tail}: a rank without one would leave the others waiting for its "
                f"gradient; pass drop_last=True, `microbatch_size` or another batch_size"
            )


# --- ranks that disagree ---

DIFFERENT = {
    "length": ({"dataset": range(12)}, "`the length` differ", "the length=10", "the length=12"),
    "batch size": ({"batch_size": 5}, "`batch_size` differ", "batch_size=4", "batch_size=5"),
    "seed": ({"seed": 2}, "`seed` differ", "seed=1", "seed=2"),
    "no seed": ({"seed": None}, "`seed` differ", "seed=1", "seed=None"),
    "shuffle": (
        {"shuffle": True},
        "`shuffle`, `drop_last` differ",
        "shuffle=False",
        "shuffle=True",
    ),
    "drop_last": ({"drop_last": True}, "`drop_last` differ", "drop_last=False", "drop_last=True"),
    "microbatches": (
        {"microbatch_size": 2},
        "`microbatch_size` differ",
        "microbatch_size=None",
        "microbatch_size=2",
    ),
    "reproducible": (
        {"reproducible": False},
        "`reproducible` differ",
        "reproducible=True",
        "reproducible=False",
    ),
    "streams": (
        {"dataset": Stream(), "sharded": True},
        "`the length`, `sharded` differ",
        "the length=10, sharded=False",
        "the length=None, sharded=True",
    ),
}


def _disagreeing():
    found = {}
    for name, (other, *_) in DIFFERENT.items():
        arguments = {"dataset": range(10), "batch_size": 4, "seed": 1, "num_workers": 0}
        if dist.get_rank() == 1:
            arguments |= other
        found[name] = caught(lambda a=arguments: make_loader(**a))
    return found, batches(range(3), 3, num_workers=0)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_disagree_get_a_table_on_every_rank(size):
    for rank, (found, after) in enumerate(run(_disagreeing, world_size=size)):
        for name, (_, differ, most, odd) in DIFFERENT.items():
            raised = found[name]
            assert isinstance(raised, Raised), (rank, name)
            assert raised.type == "RuntimeError"
            assert f"every rank must pass the same to `make_loader`, but {differ}:" in raised.text
            others = ", ".join(str(r) for r in range(size) if r != 1)
            assert f"\n  rank {others}: {most}" in raised.text
            assert f"\n  rank 1: {odd}" in raised.text
            assert raised.text.endswith("Pass the same data set and arguments on every rank.")
        assert len(after) == 1


# --- distributed ---


def _distributed(value):
    return batches(range(4), 4, distributed=value, num_workers=0)


@pytest.mark.parametrize("value", ["auto", True, False])
def test_distributed_says_whether_the_ranks_share(value):
    whole = [[0, 1, 2, 3]]
    shared = [[[0, 1]], [[2, 3]]]
    assert run(_distributed, value, world_size=2) == ([whole] * 2 if value is False else shared)


def test_alone_auto_and_false_are_the_same_and_true_insists_on_a_launcher():
    assert _distributed("auto") == _distributed(False) == [[0, 1, 2, 3]]
    text = (
        "`distributed` must be 'auto' or False without a launcher, but is True: start the script "
        "with torchrun, srun or mpirun and call `pardata.init()` first"
    )
    with pytest.raises(RuntimeError, match=re.escape(text)):
        _distributed(True)


def test_distributed_true_is_met_by_a_group_of_one():
    assert run(_distributed, True, world_size=1) == [[[0, 1, 2, 3]]]


@pytest.mark.parametrize("value", ["yes", None, 1, 0, "True"])
def test_any_other_distributed_is_refused(value):
    text = f"`distributed` must be True, False or 'auto', but is {value!r}"
    with pytest.raises(ValueError, match=re.escape(text)):
        _distributed(value)


def _only_rank_one():
    # No rank waits for another: only one of them makes a loader, of other arguments at that.
    return batches(range(3), 2, distributed=False, num_workers=0) if dist.get_rank() else None


def test_distributed_false_is_not_collective():
    assert run(_only_rank_one, world_size=2) == [None, [[0, 1], [2]]]


def test_without_init_under_a_launcher_it_says_so(monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="`make_loader` needs the process group"):
        make_loader(range(4), 2)


# --- the seed ---


def _seedless():
    torch.manual_seed(5 + dist.get_rank())
    before = torch.get_rng_state()
    order = batches(range(20), 4, shuffle=True, num_workers=0)
    assert torch.equal(torch.get_rng_state(), before)
    return order


def test_no_seed_is_that_of_rank_zero():
    torch.manual_seed(5)
    alone = batches(range(20), 4, shuffle=True, num_workers=0)
    one, other = run(_seedless, world_size=2)
    assert [a + b for a, b in zip(one, other, strict=True)] == alone
    assert alone == batches(range(20), 4, shuffle=True, seed=5, num_workers=0)
    assert alone != batches(range(20), 4, shuffle=True, seed=6, num_workers=0)


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 + 1])
def test_any_integer_is_a_seed(seed):
    assert sorted(flat(batches(range(8), 4, shuffle=True, seed=seed, num_workers=0))) == [*range(8)]


# --- shares that differ ---


class Keeper(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def _warnings_of(arguments):
    keeper = Keeper()
    logging.getLogger("pardata.data._make_loader").addHandler(keeper)
    for batch_size, options in arguments:
        for _ in range(2):
            make_loader(range(24), batch_size, num_workers=0, **options)
    return keeper.lines


def test_shares_that_differ_in_training_are_warned_about_once_on_rank_0():
    arguments = [
        (8, {"shuffle": True}),
        (8, {"sampler": SequentialSampler(range(24))}),
        (8, {}),
        (9, {"shuffle": True}),
        (8, {"shuffle": True, "microbatch_size": 2}),
    ]
    text = (
        "[0/3] `batch_size` 8 leaves 3 ranks shares that differ by one sample, which "
        "`pardata.backward` weights, while a loss.backward() of one's own takes the plain mean of "
        "their gradients: use `pardata.backward`, or choose a multiple of 3"
    )
    assert run(_warnings_of, arguments, world_size=3) == [[text], [], []]
    assert run(_warnings_of, arguments, world_size=1) == [[]]


def test_ranks_that_will_idle_are_named_once_on_rank_0():
    arguments = [(8, {"microbatch_size": 4}), (8, {"microbatch_size": 7}), (9, {})]
    text = (
        "[0/3] a `batch_size` of 8 in microbatches of {} is 2, fewer than the 3 ranks: ranks 2 to "
        "2 idle; make `microbatch_size` smaller"
    )
    found = run(_warnings_of, arguments, world_size=3)
    assert found == [[text.format(4), text.format(7)], [], []]
    enough = [(8, {"microbatch_size": 3}), (9, {"microbatch_size": 3})]
    assert run(_warnings_of, enough, world_size=3) == [[], [], []]


# --- what is DataLoader's own ---


def _note_worker(worker):
    get_worker_info().dataset.dataset[0] = 100 + worker


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


def test_collate_fn_makes_the_batch():
    loader = make_loader(range(5), 2, num_workers=0, collate_fn=sum)
    assert list(loader) == [1, 5, 4]
    with_workers = make_loader(range(5), 2, num_workers=1, collate_fn=sum)
    assert list(with_workers) == [1, 5, 4]


def test_a_collate_fn_is_given_one_microbatch_at_a_time():
    loader = make_loader(range(7), 5, num_workers=0, collate_fn=sum, microbatch_size=2)
    assert [list(step) for step in loader] == [[1, 5, 4], [11]]


def test_workers_may_be_spawned():
    loader = make_loader(range(4), 2, num_workers=1, multiprocessing_context="spawn")
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_arguments_are_handed_on():
    context = multiprocessing.get_context("spawn")
    loader = make_loader(
        range(4),
        2,
        num_workers=1,
        timeout=7.5,
        prefetch_factor=3,
        multiprocessing_context=context,
        persistent_workers=False,
        worker_init_fn=_note_worker,
    )
    inside = loader._loader
    assert (inside.num_workers, inside.timeout, inside.prefetch_factor) == (1, 7.5, 3)
    assert inside.multiprocessing_context is context
    assert inside.persistent_workers is False
    assert inside.worker_init_fn is _note_worker
    assert inside.pin_memory is False


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, True)])
def test_workers_persist_where_there_are_any(workers, persistent):
    loader = make_loader(range(4), 2, num_workers=workers)
    assert loader._loader.persistent_workers is persistent


@pytest.mark.filterwarnings("ignore:'pin_memory'")  # newer PyTorch warns where there is no GPU
def test_what_is_for_workers_goes_with_auto_where_that_finds_none():
    data = TensorDataset(torch.arange(4))
    loader = make_loader(data, 2, timeout=30, prefetch_factor=3, pin_memory=True)
    assert loader._loader.num_workers == 0
    assert [batch.tolist() for (batch,) in loader] == [[0, 1], [2, 3]]
    assert make_loader(range(4), 2, num_workers=1, timeout=30)._loader.timeout == 30


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_workers": 0, "prefetch_factor": 2}, "prefetch_factor option could only be"),
        ({"num_workers": 0, "persistent_workers": True}, "persistent_workers option needs"),
        ({"timeout": -1}, "`timeout` must be a number of seconds from 0 up, but is -1"),
        ({"timeout": "5"}, "`timeout` must be a number of seconds from 0 up, but is '5'"),
        ({"timeout": True}, "`timeout` must be a number of seconds from 0 up, but is True"),
        ({"num_workers": 0, "timeout": 5}, "`timeout` must be 0 without workers, .*, but is 5"),
    ],
)
def test_what_dataloader_refuses_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        make_loader(range(4), 2, **options)


@pytest.mark.filterwarnings("ignore:'pin_memory'")  # newer PyTorch warns where there is no GPU
def test_pinning_may_be_asked_for():
    loader = make_loader(range(4), 2, num_workers=0, pin_memory=True)
    assert loader._loader.pin_memory is True
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_batches_are_placed_on_the_device():
    assert next(iter(make_loader(range(4), 2, num_workers=0))).device.type in ("cpu", "cuda")
    for device in ("meta", torch.device("meta")):
        loader = make_loader({0: 1.5, 1: 2.5}, 2, num_workers=0, device=device)
        assert next(iter(loader)).device.type == "meta"
    loader = make_loader(range(4), 2, num_workers=0, device=None)
    assert next(iter(loader)).device.type == "cpu"


def test_an_unknown_device_is_refused():
    with pytest.raises(RuntimeError, match="gpu"):
        make_loader(range(4), 2, device="gpu")


def _worker_seeds():
    loader = make_loader(WhoAmI(), 8, num_workers=1, seed=3)
    return [int(seeds[0]) for _ in range(2) for _, _, seeds in loader]


def test_workers_of_each_rank_have_a_seed_of_their_own_and_the_same_in_every_run():
    one, other = run(_worker_seeds, world_size=2)
    assert one[0] != other[0]
    assert run(_worker_seeds, world_size=2) == [one, other]


# --- samplers ---


class Epochs(Sampler):
    """Knows its epoch, as a DistributedSampler does."""

    def __init__(self):
        self.told = []

    def __len__(self):
        return 4

    def set_epoch(self, epoch):
        self.told.append(epoch)

    def __iter__(self):
        return iter([(i + self.told[-1]) % 4 for i in range(4)])


class Short(Epochs):
    def __iter__(self):
        return iter(range(3))


def _with_sampler(sampler, epochs=2):
    loader = make_loader(range(12), 4, sampler=sampler, seed=1, num_workers=0)
    return [[batch.tolist() for batch in loader] for _ in range(epochs)]


SAMPLERS = {
    "RandomSampler": RandomSampler(range(12)),
    "WeightedRandomSampler": WeightedRandomSampler([1.0] * 6 + [0.0] * 6, 12),
    "SubsetRandomSampler": torch.utils.data.SubsetRandomSampler(range(0, 12, 2)),
    "SequentialSampler": SequentialSampler(range(12)),
}


def _with_all_samplers():
    before = torch.get_rng_state()
    found = {name: _with_sampler(sampler) for name, sampler in SAMPLERS.items()}
    assert torch.equal(torch.get_rng_state(), before)
    return found


def test_a_sampler_gives_the_same_order_at_every_world_size():
    alone = _with_all_samplers()
    teams = {size: run(_with_all_samplers, world_size=size) for size in (2, 3)}
    for name, epochs in alone.items():
        assert (epochs[0] == epochs[1]) is (name == "SequentialSampler")
        for team in teams.values():
            for epoch, steps in enumerate(epochs):
                shares = zip(*(ranks[name][epoch] for ranks in team), strict=True)
                assert [flat(step) for step in shares] == steps
    assert sorted(flat(alone["RandomSampler"][0])) == list(range(12))
    assert max(flat(alone["WeightedRandomSampler"][0])) < 6
    assert {i % 2 for i in flat(alone["SubsetRandomSampler"][0])} == {0}


def test_a_sampler_is_told_the_epoch():
    sampler = Epochs()
    assert _with_sampler(sampler, 3) == [[[0, 1, 2, 3]], [[1, 2, 3, 0]], [[2, 3, 0, 1]]]
    assert sampler.told == [0, 0, 1, 2]  # of the first epoch it is asked twice


def _sampler_errors():
    rank = dist.get_rank()
    found = [
        caught(_with_sampler, [rank] * 12),
        caught(_with_sampler, Short() if rank == 1 else Epochs()),
    ]
    return found, _with_sampler(SequentialSampler(range(12)), 1)


@pytest.mark.parametrize("size", [2, 3])
def test_a_sampler_that_differs_between_ranks_raises_on_every_rank(size):
    for rank, ((differs, short), after) in enumerate(run(_sampler_errors, world_size=size)):
        assert differs.type == "RuntimeError"
        assert (
            "must pass the same to `make_loader(sampler=…)`, but `the order` differ" in differs.text
        )
        assert "\n  rank 1: the order=" in differs.text
        assert differs.text.endswith("Make the sampler of the same arguments on every rank.")
        assert short.type == ("ValueError" if rank == 1 else "RuntimeError")
        assert "`sampler` must yield as many indices as its length, 4, but yielded 3" in short.text
        assert len(after[0]) == 3


def _with_a_generator_on_one_rank():
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = None if rank else torch.Generator().manual_seed(0)
    return _with_sampler(RandomSampler(range(12), generator=own))


@pytest.mark.parametrize("size", [1, 2])
def test_a_sampler_with_a_generator_of_its_own_is_refused_on_every_rank(size):
    for raised in run_caught(_with_a_generator_on_one_rank, world_size=size):
        assert "but RandomSampler yielded another for epoch 0 when asked again" in raised.text


def test_alone_the_length_of_a_sampler_is_checked_too():
    with pytest.raises(ValueError, match="as its length, 4, but yielded 3"):
        _with_sampler(Short())


def test_a_sampler_of_lists_reads_whole_batches_of_a_data_set_that_can():
    # As DataLoader(sampler=BatchSampler(…)) does: an index is whatever the sampler yields.
    class Grid(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return torch.tensor(index)

    sampler = BatchSampler(SequentialSampler(range(6)), 2, drop_last=False)
    found = [batch.tolist() for batch in make_loader(Grid(), 2, sampler=sampler, num_workers=0)]
    assert found == [[[0, 1], [2, 3]]]

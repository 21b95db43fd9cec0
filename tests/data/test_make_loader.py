"""make_loader: its arguments, and what a bad one gets, on every rank."""

import json
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from data_zoo import Count, Numbers, Rotated, Sized, flat, joined, log_of, rows
from on_ranks import caught, run
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from pardata import Loader, backward, make_loader, wrap_model
from pardata.seeds._generators import forked_seed
from pardata.seeds._mix import mix


class WhoAmI(Numbers):
    """Tells under which seed its worker reads."""

    def __getitem__(self, index):
        return get_worker_info().seed


def batches(*args, **options):
    return [batch.tolist() for batch in make_loader(*args, **options)]


# --- datasets ---


@pytest.mark.parametrize(
    "dataset",
    [
        range(5),
        Subset(range(10), [0, 1, 2, 3, 4]),
        ConcatDataset([[0, 1], [2, 3, 4]]),
        Count(5),
        Sized(5),
    ],
)
def test_anything_with_items_and_a_length_is_a_data_set_and_so_is_a_stream(dataset):
    loader = make_loader(dataset, 2, num_workers=0)
    assert isinstance(loader, Loader)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert loader.dataset is dataset
    assert loader.batch_size == 2
    assert type(dataset) is Count or len(loader) == 3


def test_an_empty_data_set_has_no_step():
    loader = make_loader([], 2, num_workers=0)
    assert len(loader) == 0
    assert list(loader) == []
    assert loader.epoch == 1


# --- bad arguments, alone and on every rank ---


def length(data, options):
    return len(make_loader(data, 8, **options))


def _sizes_at_the_edge():
    size = dist.get_world_size()
    found = [len(make_loader(range(10), size)), len(make_loader(range(10), 10, shuffle=True))]
    shuffled = {"shuffle": True, "drop_last": False}
    for tail in range(size + 1):
        data = range(2 * 8 + tail)
        sampled = {"sampler": SequentialSampler(data), "drop_last": False}
        one, other = (caught(length, data, options) for options in (shuffled, sampled))
        assert type(one) is type(other)
        found += [one, length(data, {})]
    return found


def test_a_shuffled_tail_smaller_than_the_world_is_refused_and_no_other():
    for found in run(_sizes_at_the_edge, world_size=3):
        assert found[:2] == [4, 1]
        shuffled, ordered = found[2::2], found[3::2]
        assert ordered == [2, 3, 3, 3]
        assert (shuffled[0], shuffled[3]) == (2, 3)
        for tail in (1, 2):
            assert shuffled[tail].type == "ValueError"
            text = f"a sample for each of the 3 ranks, but has {tail} of {16 + tail}: a rank"
            assert text in shuffled[tail].text


# --- distributed ---


def _distributed(value):
    return batches(range(4), 4, distributed=value, num_workers=0)


@pytest.mark.parametrize("value", ["auto", True, False])
def test_distributed_says_whether_the_ranks_share(value):
    whole = [[0, 1, 2, 3]]
    shared = [[[0, 1]], [[2, 3]]]
    assert run(_distributed, value, world_size=2) == ([whole] * 2 if value is False else shared)


def test_alone_auto_and_false_are_the_same():
    assert _distributed("auto") == _distributed(False) == [[0, 1, 2, 3]]


def _only_rank_one():
    # No rank waits for another: only one of them makes a loader, of other arguments at that.
    return batches(range(3), 2, distributed=False, num_workers=0) if dist.get_rank() else None


def test_distributed_false_is_not_collective():
    assert run(_only_rank_one, world_size=2) == [None, [[0, 1], [2]]]


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
    with log_of("pardata.model._uneven_shares") as log:
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


needs_fsdp = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of torch 2.6 needs a GPU"
)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=needs_fsdp)])
def test_uneven_shares_are_warned_about_once_where_backward_does_not_weight_them(strategy):
    text = (
        "[0/3] `batch_size` 8 leaves 3 ranks shares that differ by one sample, and a "
        "loss.backward() takes the plain mean of their gradients: call `pardata.backward`, which "
        "weights them, choose a multiple of 3, or weight the loss yourself"
    )
    for arguments in UNEVEN.values():
        found = run(_warnings_of_training, strategy, [arguments], world_size=3)
        assert found == [([], [text]), ([], []), ([], [])]
        assert run(_warnings_of_training, strategy, [arguments], world_size=2) == [([], [])] * 2
    found = run(_warnings_of_training, strategy, [*EVEN.values()], world_size=3)
    assert found == [([], [])] * 3


def _warnings_of(arguments):
    with log_of("pardata.data._loader_arguments") as log:
        for batch_size, options in arguments:
            for _ in range(2):
                make_loader(range(24), batch_size, num_workers=0, **options)
    return log.lines


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


def test_a_collate_fn_is_given_one_microbatch_at_a_time():
    loader = make_loader(range(7), 5, num_workers=0, collate_fn=sum, microbatch_size=2)
    assert [list(step) for step in loader] == [[1, 5, 4], [11]]


def inside(loader):
    return loader._source.workers


def test_arguments_are_handed_on():
    handed = {
        "num_workers": 1,
        "timeout": 7.5,
        "prefetch_factor": 3,
        "multiprocessing_context": multiprocessing.get_context("spawn"),
        "persistent_workers": False,
        "worker_init_fn": _note_worker,
        "pin_memory": False,
    }
    loader = inside(make_loader(range(4), 2, **handed))
    assert {name: getattr(loader, name) for name in handed} == handed
    assert inside(make_loader(range(4), 2, num_workers=1)).persistent_workers is True


@pytest.mark.filterwarnings("ignore:'pin_memory'")  # newer PyTorch warns where there is no GPU
def test_what_is_for_workers_goes_with_auto_where_that_finds_none():
    data = TensorDataset(torch.arange(4))
    loader = make_loader(data, 2, timeout=30, prefetch_factor=3, pin_memory=True)
    assert [batch.tolist() for (batch,) in loader] == [[0, 1], [2, 3]]
    assert inside(make_loader(range(4), 2, num_workers=1, timeout=30)).timeout == 30


@pytest.mark.parametrize("timeout", ["5", True, float("nan")])
def test_a_timeout_that_is_no_number_is_refused(timeout):
    with pytest.raises(ValueError, match=f"a number of seconds from 0 up, but is {timeout!r}"):
        make_loader(range(4), 2, timeout=timeout)


def _worker_seeds():
    loader = make_loader(WhoAmI(8), 8, num_workers=1, seed=3)
    return [int(seeds[0]) for _ in range(2) for seeds in loader]


def test_workers_of_each_rank_have_a_seed_of_their_own_and_the_same_in_every_run():
    one, other = run(_worker_seeds, world_size=2)
    assert one[0] != other[0]
    assert run(_worker_seeds, world_size=2) == [one, other]


# --- samplers ---


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
    sampler = Rotated(4)
    assert _with_sampler(sampler, 3) == [[[0, 1, 2, 3]], [[1, 2, 3, 0]], [[2, 3, 0, 1]]]
    assert sampler.told == [0, 0, 1, 2]  # of the first epoch it is asked twice


# --- batch samplers: the global batches ---


class ByLength(Sampler):
    """Batches of samples of like length, of unlike numbers, in another order each epoch."""

    def __init__(self, lengths, tokens):
        self.lengths, self.tokens, self.epoch = lengths, tokens, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        batches, batch = [], []
        for index in sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], i)):
            if batch and self.lengths[index] * (len(batch) + 1) > self.tokens:
                batches, batch = [*batches, batch], []
            batch.append(index)
        batches.append(batch)
        return iter([batches[i] for i in torch.randperm(len(batches))] + batches[: self.epoch])


LENGTHS = [1 + 7 * i % 5 for i in range(28)]
BATCH_SAMPLERS = {
    "by tokens": (ByLength(LENGTHS, 20), {}),
    "torch's": (BatchSampler(RandomSampler(range(28)), 4, drop_last=True), {}),
    "a list": ([[3, 1, 2], torch.tensor([0, 5, 5, 7]), (25, 24, 23)], {}),
    "in microbatches": (ByLength(LENGTHS, 20), {"microbatch_size": 2}),
    "small, in microbatches": ([[1], [2, 3], [4, 5, 6, 7, 8]], {"microbatch_size": 2}),
}


def _batch_sampled(states=None, stop=None):
    """Run two epochs of each, or what is left of them, and leave each after so many steps."""
    found = {}
    for name, (sampler, options) in BATCH_SAMPLERS.items():
        loader = make_loader(range(28), batch_sampler=sampler, seed=1, num_workers=0, **options)
        loader.load_state_dict((states or {}).get(name, loader.state_dict()))
        seen, hashes = [], []
        for _ in loader.epochs(2):
            for batch in loader:
                seen.append(rows(batch))
                hashes.append(loader.fingerprint() if "torch" not in name else "")
                if len(seen) == stop:
                    break
            if len(seen) == stop:
                break
        found[name] = seen, hashes, json.loads(json.dumps(loader.state_dict()))
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_batches_of_a_batch_sampler_are_shared_out_and_gone_on_with_at_any_size(size):
    alone = _batch_sampled()
    sampler = BATCH_SAMPLERS["by tokens"][0]
    sampler.set_epoch(0)
    with forked_seed(mix(1, 0)):
        expected = list(sampler)
    assert alone["by tokens"][0][: len(expected)] == expected
    first = run(_batch_sampled, None, 3, world_size=size)
    states = {name: found[2] for name, found in first[0].items()}
    rest = run(_batch_sampled, states, None, world_size=size % 3 + 1)
    for name, (whole, hashes, end) in alone.items():
        assert states[name]["batch_sampler"] == type(BATCH_SAMPLERS[name][0]).__name__
        found = [joined([rank[name][0] for rank in part]) for part in (first, rest)]
        assert found[0] + found[1] == whole
        assert [rank[name][1] for rank in rest] == [hashes[3:]] * len(rest)
        assert {json.dumps(rank[name][2]) for rank in rest} == {json.dumps(end)}


def test_a_loader_of_a_batch_sampler_has_its_length_and_no_batch_size():
    loader = make_loader(range(28), batch_sampler=[[1, 2], [3]], num_workers=0)
    assert (len(loader), loader.batch_size) == (2, None)
    with pytest.raises(TypeError, match="that of its batch_sampler, but ByLength has none: give"):
        len(make_loader(range(28), batch_sampler=ByLength(LENGTHS, 20)))


ORDERS = [
    ("batch_sampler", {}, [[1, 2], [3], [4, 5]], [[1, 2], [4], [3, 5]]),
    ("sampler", {"batch_size": 2}, [1, 2, 3, 4], [1, 2, 4, 3]),
]


@pytest.mark.parametrize(("argument", "options", "one", "other"), ORDERS)
def test_another_order_than_the_one_in_which_the_epoch_was_begun_is_refused(
    argument, options, one, other
):
    def loader(order):
        return make_loader(range(9), num_workers=0, **{argument: order}, **options)

    begun, again = loader(one), loader(other)
    next(iter(begun))
    again.load_state_dict(begun.state_dict())
    with pytest.raises(
        ValueError, match=f"the order that `{argument}` yields, but that of epoch 0"
    ):
        iter(again)


def test_a_place_inside_a_batch_of_a_batch_sampler_is_none():
    loader = make_loader(range(9), num_workers=0, batch_sampler=[[1, 2], [3]])
    loader.load_state_dict({**loader.state_dict(), "delivered": 1})
    with pytest.raises(ValueError, match="is another one now: make it of the same data"):
        iter(loader)

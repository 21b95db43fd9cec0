"""reproducible=True: the same random numbers for a sample or microbatch, wherever it is read."""

import logging
import random
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from common_data import (
    Buffer,
    Count,
    Drawing,
    Numbers,
    flat,
    joined,
    loader_of,
    rows,
    states,
    steps,
)
from logged import log_of
from on_ranks import caught, run
from torch.utils.data import (
    ConcatDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from pardata import all_gather, make_loader, seed_everything


class DrawingSometimes(Drawing):
    """Draws from one generator more at some samples, in the middle of a batch."""

    def __getitem__(self, index):
        number = float(index)
        if index % 3 == 1:
            number += random.random()
        if index % 4 == 2:
            number += float(np.random.rand())  # noqa: NPY002  # as users do
        if index > 8:
            number += torch.rand(()).item()
        return number


class Named(Drawing):
    """Is indexed by something else than whole numbers."""

    def __getitem__(self, index):
        return super().__getitem__(ord(index))


class Items(Drawing):
    """Draws for a whole batch at once."""

    def __getitems__(self, indices):
        return [index + random.random() + torch.rand(()).item() for index in indices]


class WholeItems(Drawing):
    def __getitems__(self, indices):
        return torch.tensor(indices) + torch.rand(len(indices))


class Generators(Drawing):
    """Draws from a generator of its own."""

    def __init__(self, kind="torch"):
        super().__init__(9)
        self.own = {
            "python": random.Random(1),
            "numpy": np.random.default_rng(1),
            "torch": torch.Generator().manual_seed(1),
        }[kind]

    def __getitem__(self, index):
        if isinstance(self.own, torch.Generator):
            return index + torch.rand((), generator=self.own).item()
        return index + self.own.random()


def epochs_of(data, count=2, **options):
    loader = loader_of(data, 4, **options)
    return [steps(loader) for _ in range(count)]


# --- samples ---

SAMPLES = {
    "drawing": (Drawing(), {}),
    "shuffled": (Drawing(), {"shuffle": True}),
    "sometimes": (DrawingSometimes(), {"shuffle": True}),
    "a subset": (Subset(Drawing(), range(3, 12)), {}),
    "several": (ConcatDataset([Drawing(5), DrawingSometimes(6)]), {"shuffle": True}),
    "sampled": (Drawing(), {"sampler": RandomSampler(range(13), replacement=True)}),
    "named": (Named(), {"sampler": list("reproducibly")}),
    "microbatches": (Drawing(), {"microbatch_size": 1}),
    "collated": (Drawing(), {"collate_fn": torch.tensor}),
}


def test_a_sample_does_not_depend_on_the_order_or_the_batch():
    ordered = sorted(row for step in epochs_of(Drawing(), 1)[0] for row in step)
    shuffled = epochs_of(Drawing(), 1, shuffle=True, drop_last=False)[0]
    pieces = epochs_of(Drawing(), 1, microbatch_size=1)[0]
    assert sorted(row for step in shuffled for row in step) == ordered
    assert sorted(row for step in pieces for part in step for row in part) == ordered


BATCHES = [[0, 0, 1, 0], [2, 1, 1, 1], [3, 3, 4, 0]]
REPEATED = {
    "RASampler": {"sampler": [i for i in range(5) for _ in range(3)], "drop_last": False},
    "weighted": {"sampler": WeightedRandomSampler([1.0, 9.0, 9.0, 1.0, 1.0], 16)},
    "batches": {"batch_sampler": BATCHES, "batch_size": None},
    "microbatches": {"batch_sampler": BATCHES, "batch_size": None, "microbatch_size": 2},
}


def _repeated(name, workers, state=None):
    """Return the samples of the steps left of two epochs, and the state in each."""
    loader = loader_of(Drawing(5), **{"batch_size": 4, **REPEATED[name]}, num_workers=workers)
    if state is not None:
        loader.load_state_dict(state)
    return [(rows(batch), loader.state_dict()) for _ in loader.epochs(2) for batch in loader]


def _flat(step):
    return [row for part in step for row in (part if isinstance(part, list) else [part])]


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_samples_are_augmented_differently_and_reproducibly(name):
    whole = _repeated(name, 0)
    numbers = [number for step, _ in whole for number in _flat(step)]
    assert len({round(number % 1, 9) for number in numbers}) == len(numbers)
    assert len({int(number) for number in numbers}) < len(numbers)
    for size, workers, begun in [(3, 0, None), (2, 2, 1)]:
        state = None if begun is None else whole[begun][1]
        ranks = run(_repeated, name, workers, state, world_size=size)
        rest = joined([[_flat(step) for step, _ in found] for found in ranks])
        after = 0 if begun is None else begun + 1
        assert rest == [_flat(step) for step, _ in whole[after:]]


# --- also one that it reads and does not draw from ---


class Late(Numbers):
    """Draws at some samples only."""

    def __init__(self, since):
        super().__init__(13)
        self.since = since

    def __getitem__(self, index):
        number = super().__getitem__(index)
        return number + (random.random() if index >= self.since else 0.0)


@pytest.mark.parametrize("since", [5, 12])
def test_samples_that_start_to_draw_late_draw_the_same_numbers(since):
    data = Late(since)
    (late,) = epochs_of(data, 1)
    assert data.read == 13
    (always,) = epochs_of(Late(0), 1)
    assert flat(late)[since:] == flat(always)[since:]
    assert flat(late)[:since] == [*range(since)]


class Seeded(Numbers):
    """Has a seed or a state of a default generator, as who makes one of its own wants."""

    def __init__(self, kind):
        super().__init__(13)
        self.kind = kind

    def __getitem__(self, index):
        if self.kind == "torch":
            return torch.initial_seed()
        states = random.getstate()[1] if self.kind == "Python" else np.random.get_state()[1]  # noqa: NPY002  # as users do
        return int(states[1])  # Python keeps the first one as it is


@pytest.mark.parametrize("kind", ["torch", "Python", "NumPy"])
def test_a_seed_differs_in_each_sample_and_epoch(kind):
    found = epochs_of(Seeded(kind), 3)
    assert len({*flat(flat(found))}) == 3 * 13
    assert epochs_of(Seeded(kind), 3, num_workers=2) == found


# --- the training process ---


LEFT_ALONE = [
    (DrawingSometimes(), {"shuffle": True}),
    *((Buffer(13), {"reproducible": reproducible}) for reproducible in (True, False)),
]


@pytest.mark.parametrize(("data", "options"), LEFT_ALONE)
@pytest.mark.parametrize("workers", [0, 1])
def test_the_generators_of_the_training_process_are_left_alone(workers, data, options):
    loader = make_loader(data, 4, num_workers=workers, **options)
    before = states()
    for _ in range(2):
        for _ in loader:
            assert states() == before
        assert states() == before


def test_a_loop_that_seeds_does_not_change_the_samples():
    found = []
    for batch in make_loader(Drawing(), 4, seed=1, num_workers=0):
        found.append(batch.tolist())
        random.seed(0)
        torch.manual_seed(0)
    assert found == epochs_of(Drawing(), 1)[0]


def test_without_it_a_data_set_draws_from_the_generators_as_they_are():
    seed_everything(5)
    expected = [Drawing()[index] for index in range(13)]
    after = states()
    seed_everything(5)
    (found,) = epochs_of(Drawing(), 1, reproducible=False)
    assert [row for step in found for row in step] == expected
    assert states() == after


# --- collate_fn, batch_transform and __getitems__ that draw ---

DRAWS = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(())}


class Draws:
    """Passes a batch on, and draws from step `since` on."""

    def __init__(self, kind, since=0):
        self.kind, self.left = kind, since

    def __call__(self, batch):
        self.left -= 1
        if self.left < 0:
            DRAWS[self.kind]()
        return torch.as_tensor(batch)


class DrawsAsItems(Numbers):
    def __init__(self, draws):
        super().__init__(13)
        self.draws = draws

    def __getitems__(self, indices):
        return self.draws(indices).tolist()


def loader_that_draws(what, draws, **options):
    data = DrawsAsItems(draws) if what == "__getitems__" else Numbers(13)
    if what != "__getitems__":
        options[what] = draws
    return make_loader(data, 4, **{"num_workers": 0, **options})


WHAT = ["collate_fn", "batch_transform", "__getitems__"]


@pytest.mark.parametrize(("kind", "since"), [*((kind, 0) for kind in DRAWS), ("torch", 3)])
@pytest.mark.parametrize("what", WHAT[:2])
def test_drawing_for_a_share_raises_and_names_both_cures(what, kind, since):
    seen, loader = [], loader_that_draws(what, Draws(kind, since))
    raised = caught(lambda: seen.extend(batch.tolist() for batch in loader))
    assert len(seen) == since
    text = f"RuntimeError: `{what}` must draw no random numbers: pass"
    assert str(raised).startswith(text)


@pytest.mark.parametrize(("since", "told_at"), [(15, 15), (16, 16), (17, 32), (40, 48)])
def test_drawing_from_a_later_step_on_raises_sixteen_steps_later_at_most(since, told_at):
    loader = make_loader(Numbers(60), 1, batch_transform=Draws("numpy", since), num_workers=0)
    seen = []
    assert "must draw no random numbers" in str(caught(lambda: seen.extend(loader)))
    assert len(seen) == told_at


def _draws_in_a_worker():
    return caught(steps, loader_that_draws("collate_fn", Draws("torch"), num_workers=1)).text


def test_drawing_in_a_worker_raises_and_names_microbatches():
    # In a process of its own: the workers of a loader that failed hang on its traceback.
    (text,) = run(_draws_in_a_worker, world_size=1, fresh=True)
    assert "`collate_fn` must draw no random numbers: pass" in text
    assert "pass `microbatch_size`" in text


class Augmented(Subset):
    """As PyTorch asks of a subclass that has a `__getitem__`; draws for one sample in four."""

    def __getitem__(self, index):
        value = self.dataset[self.indices[index]]
        return value + (torch.rand(()).item() if value % 4 == 0 else 0.0)

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def _augmented(workers):
    data = Augmented(range(40), range(40))
    loader = make_loader(data, 8, seed=0, num_workers=workers)
    return [gathered(batch) for batch in loader]


def gathered(batch):
    return [value for part in all_gather(batch) for value in part.tolist()]


def test_getitems_that_draw_give_the_same_samples_at_every_size():
    expected = [_augmented(0)]
    assert sum(value % 1 > 0 for value in expected[0][0]) == 2
    for size, workers in [(1, 2), (2, 0), (3, 1)]:
        assert run(_augmented, workers, world_size=size) == expected * size


@pytest.mark.parametrize("what", WHAT)
def test_without_reproducible_it_may_draw(what):
    for kind in DRAWS:
        before = states()
        assert len(list(loader_that_draws(what, Draws(kind), reproducible=False))) == 4
        assert states() != before


def noise(batch):
    return torch.as_tensor(batch) + random.random() + torch.rand(len(batch))


def more_noise(batch):
    return batch + float(np.random.rand()) + torch.rand(len(batch))  # noqa: NPY002  # as users do


MICROBATCHES = {
    "collate_fn": (Drawing(), {"collate_fn": noise}),
    "batch_transform": (Drawing(), {"batch_transform": more_noise}),
    "both": (Drawing(), {"collate_fn": noise, "batch_transform": more_noise}),
    "whole": (
        TensorDataset(torch.arange(13.0)),
        {"batch_transform": lambda batch: noise(batch[0])},
    ),
    "items": (Items(), {}),
    "whole items": (WholeItems(), {"shuffle": True}),
    "a stream": (Count(13), {"collate_fn": noise}),
    "all": (Items(), {"collate_fn": noise, "batch_transform": more_noise, "shuffle": True}),
}


# Those that workers read too: in them seeds are made for samples, microbatches and streams.
IN_WORKERS = ("sometimes", "a subset", "named", "microbatches", "a stream", "all")


def _epochs(workers):
    found = {}
    for name, (data, options) in {**SAMPLES, **MICROBATCHES}.items():
        pieces = {"microbatch_size": 2} if name in MICROBATCHES else {}
        numbers = workers if name in IN_WORKERS else workers[:1]
        found[name] = [epochs_of(data, num_workers=n, **pieces, **options) for n in numbers]
    return found


@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 4))])
def test_a_sample_and_a_microbatch_are_the_same_whoever_reads_them(size):
    alone = _epochs([0])
    ranks = run(_epochs, [0, 2], world_size=size)
    for name in alone:
        for found in zip(*(rank[name] for rank in ranks), strict=True):
            assert [joined(epoch) for epoch in zip(*found, strict=True)] == alone[name][0], name
        first, second = alone[name][0]
        assert sorted(first) != sorted(second), name
    for name in MICROBATCHES:
        steps = [step for epoch in alone[name][0] for step in epoch]
        rests = [row % 1 for step in steps for part in step for row in part]
        assert len(set(rests)) == len(rests), name


def test_collate_fn_and_batch_transform_do_not_draw_the_same_numbers():
    def column(batch):
        return torch.rand(len(batch))

    def beside(batch):
        return torch.stack([batch, torch.rand(len(batch))], 1)

    (batch,) = make_loader(
        Numbers(4), 4, microbatch_size=4, collate_fn=column, batch_transform=beside, num_workers=0
    )
    assert not torch.equal(batch[0][:, 0], batch[0][:, 1])


# --- a dataset with a generator of its own ---


def warned(data, options):
    with log_of("pardata.data._make_loader", logging.WARNING) as log:
        epochs_of(data, **options)
    return log.lines


TEXT = "the loader cannot seed `{}`: use default generators, or pass reproducible=False"


class Transform:
    """A transform with a generator in a list."""

    def __init__(self):
        self.parts = [None, np.random.RandomState(0)]

    def __call__(self, batch):
        return batch


OWN = {
    "dataset.own": lambda: warned(Generators("torch"), {"num_workers": 2}),
    "dataset.datasets[0].own": lambda: warned(ConcatDataset([Generators("python")] * 2), {}),
    "batch_transform.parts[1]": lambda: warned(Numbers(13), {"batch_transform": Transform()}),
}


def warned_of(path):
    return OWN[path]()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("path", OWN)
def test_it_is_warned_about_once_on_rank_0(path, size):
    first, *others = run(warned_of, path, world_size=size)
    assert first == [f"{'[0/2] ' * (size > 1)}{TEXT.format(path)}"]
    assert others == [[]] * (size - 1)


class Files(Mapping):
    """A mapping that opens a file for each of its items."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter("abc")

    def __getitem__(self, key):
        raise OSError(key)


class Slots:
    """An object without a `__dict__`, whose attributes are looked up elsewhere."""

    __slots__ = ()

    def __getattr__(self, name):
        raise KeyError(name)


def test_what_is_reproducible_or_need_not_be_is_not_warned_about():
    assert warned(Generators(), {"reproducible": False}) == []
    held = Numbers(13)
    held.libraries, held.generator = [random, np], torch.default_generator
    held.global_ones = [random.random.__self__, np.random.random.__self__]
    held.files, held.slots = Files(), Slots()
    for data in (held, DrawingSometimes(), Subset(Drawing(), range(4))):
        assert warned(data, {}) == []

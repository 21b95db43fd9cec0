"""What is saved under one strategy and size is restored under any other, and training goes on."""

import logging
import random
import shutil
from collections import Counter, OrderedDict, UserDict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from alike import equal
from common_checkpoint import STRATEGIES, Net, Run, Thing
from logged import log_of
from on_ranks import caught, run, run_caught
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader

from pardata import (
    Checkpointer,
    MetricWriter,
    all_reduce_sum,
    backward,
    cache_dataset,
    fingerprint,
    load_weights,
    rank_zero_call,
    seed_everything,
    unwrap,
    world,
)
from pardata.rng._rng_state import next_batch_seed
from pardata.rng._seeds import noise_seed

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def strategies():
    """Return those of this world."""
    several = [strategy for strategy in STRATEGIES if strategy not in ("none", "dp")]
    return STRATEGIES if world().size == 1 else several


def bare_weights(directory, strategy):
    return Path(directory) / strategy / "weights.pt"


def save_each(directory):
    """Return, by strategy, digests of all that was saved, and of the weights in a file."""
    digests = {}
    for strategy in strategies():
        trained = Run(strategy).train(3)
        checkpointer = Checkpointer(f"{directory}/{strategy}", asynchronous=True)
        checkpointer.save(3, **trained.objects(), best=0.5)
        digests[strategy] = trained.digest(), fingerprint(trained.model)
        trained.train(1)
        checkpointer.restore(**trained.objects())
        weights = get_model_state_dict(unwrap(trained.model), options=WHOLE)
        rank_zero_call(torch.save, weights, bare_weights(directory, strategy))
    return digests


def restore_each(directory):
    found = {}
    for before in sorted(path.name for path in Path(directory).iterdir()):
        for after in strategies():
            fresh = Run(after, seed=7)
            values = Checkpointer(f"{directory}/{before}").restore(**fresh.objects())
            digest = fresh.digest()
            fresh.train(1)
            load_weights(fresh.model, bare_weights(directory, before))
            found[before, after] = values, digest, fingerprint(fresh.model)
    return found


def test_every_strategy_restores_under_every_other_at_other_sizes(tmp_path):
    saved = run(save_each, tmp_path, world_size=2)
    for strategy, (_, weights) in saved[0].items():
        plain = Net()
        plain.load_state_dict(torch.load(bare_weights(tmp_path, strategy), weights_only=True))
        assert fingerprint(plain) == weights
    for after in (1, 3):
        for found in run(restore_each, tmp_path, world_size=after):
            for (strategy, _), (values, digest, weights) in found.items():
                assert (values.step, values.values) == (3, {"best": 0.5})
                assert (digest, weights) == saved[0][strategy]


def save_one(directory, strategy, options):
    trained = Run(strategy, **options).train(3)
    Checkpointer(f"{directory}/{strategy}").save(3, **trained.objects())
    return trained.digest()


def restore_one(directory, before, strategy, options):
    fresh = Run(strategy, seed=7, **options)
    Checkpointer(f"{directory}/{before}").restore(**fresh.objects())
    digest = fresh.digest()
    fresh.train(1)
    return digest


def test_hsdp_checkpoints_restore_under_every_strategy_and_back(tmp_path):
    replicas = "fsdp", {"replicate": 2, "blocks": nn.BatchNorm1d}
    expected = run(save_one, tmp_path / "4", *replicas, world_size=4)
    for strategy, size in [("none", 1), ("fsdp", 3), ("exact", 2)]:
        told = run(restore_one, tmp_path / "4", "fsdp", strategy, {}, world_size=size)
        assert {*told} == {*expected}
    for strategy, size in [("ddp", 2), ("fsdp", 3)]:
        told = run(save_one, tmp_path / f"{size}", strategy, {}, world_size=size)
        found = run(restore_one, tmp_path / f"{size}", strategy, *replicas, world_size=4)
        assert {*told} == {*found}


# --- training goes on as if nothing had been


def train_on(strategy, before, steps, after):
    here = world()
    trained = Run(strategy, seed=11 if before else 0)
    torch.manual_seed(here.rank)  # dropout is another one on each rank
    random.seed(here.rank)
    if before is not None:
        found = Checkpointer(before).restore(**trained.objects())
        assert (found.step, found.values) == (3, {"epochs": [0, 1]})
    trained.train(steps)
    if after is not None:
        Checkpointer(after).save(3, **trained.objects(), epochs=[0, 1])
    return trained.digest(), random.random()


@pytest.mark.parametrize(("strategy", "size"), [("none", 1), ("ddp", 2), ("fsdp", 2)])
def test_resuming_at_the_same_world_size_is_bitwise_equal(strategy, size, tmp_path):
    run(train_on, strategy, None, 3, tmp_path, world_size=size)
    expected = run(train_on, strategy, None, 6, None, world_size=size)
    assert run(train_on, strategy, tmp_path, 3, None, world_size=size) == expected
    assert len({number for _, number in expected}) == size


def save_values(directory, step, values):
    Checkpointer(directory).save(step, **values)


class Position(Thing, DataLoader):
    """A loader with a state, as torchdata has one."""


class Buffer(Thing):
    """Can be iterated, and is no loader."""

    def __iter__(self):
        return iter(())


class Unwrapped(nn.ModuleList):
    """Can be iterated, and says nothing of a run."""


def save_a_run(directory, seed):
    seed_everything(seed)
    backward(nn.Linear(1, 1), lambda model, x: model(x).sum(), torch.ones(2, 1))  # counted
    torch.manual_seed(50 + world().rank)
    model = Unwrapped([nn.Linear(2, 2).requires_grad_(False)])
    for parameter in model.parameters():
        parameter.zero_()
    Checkpointer(directory).save(1, model=model, position=Position(3), buffer=Buffer(4))


def restore_a_run(directory, *names):
    """Return whether the generators were left alone, the seed of dropout, and what the log says."""
    seed_everything(8)
    things = {"model": Unwrapped([nn.Linear(2, 2)]), "position": Position(), "buffer": Buffer()}
    torch.manual_seed(70 + world().rank)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(70 + world().rank))
    with log_of("pardata", logging.INFO) as log:
        Checkpointer(directory).restore(**{name: things[name] for name in names})
    left = torch.equal(torch.rand(1), expected)
    return left, next_batch_seed(), [line for line in log.lines if "random generators" in line]


def test_restore_without_a_loader_leaves_the_generators_alone(tmp_path):
    for size in (1, 2):
        run(save_a_run, tmp_path / str(size), 5, world_size=size)
    seed = {number: seed_under(number, calls) for number, calls in [(5, 1), (8, 0)]}
    for size, before in [(1, 1), (2, 2), (3, 2), (1, 2)]:
        for names in [("model", "buffer"), ()]:
            found = run(restore_a_run, tmp_path / str(before), *names, world_size=size)
            for rank, (left, next_seed, lines) in enumerate(found):
                assert (left, next_seed, lines) == (True, seed[8][rank], [])


def test_another_world_size_restores_the_seed_but_no_generators(tmp_path):
    run(save_a_run, tmp_path, 5, world_size=2)
    for size in (1, 2, 3):
        found = run(restore_a_run, tmp_path, "model", "position", world_size=size)
        for rank, (left, next_seed, lines) in enumerate(found):
            assert (left, next_seed) == (size != 2, seed_under(5, 1)[rank])
            told = "the seed is restored, but no random generators: 2 process(es) saved theirs, "
            expected = [f"{told}and there are {size} now"] * (rank == 0 and size != 2)
            assert [line.removeprefix(f"[0/{size}] ") for line in lines] == expected


def seed_under(seed, calls):
    """Return the seed of the next dropout, by rank."""
    return [noise_seed(seed, rank) + calls + 1 for rank in range(3)]


# --- what can be saved


def stepped(make):
    net = nn.Linear(3, 3)
    optimizer = make(net.parameters())
    net(torch.randn(2, 3)).sum().backward()
    optimizer.step(lambda: torch.tensor(1.0))
    return optimizer


def scheduled(make):
    scheduler = make(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9))
    scheduler.optimizer.step()
    args = [1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []
    scheduler.step(*args)
    return scheduler


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.brief = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.imaginary = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("count", torch.randint(99, (2,)))
        self.register_buffer("conjugated", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("rows", torch.randn(6, 4)[::2, 1:3])
        self.register_buffer("empty", torch.empty(0, 3))

    def forward(self, rows):
        return rows


class Extra(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.seen = torch.rand(1).item()

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


lr = torch.optim.lr_scheduler
STEPPED = ("AdamW", "Adagrad", "Adafactor", "LBFGS")
SCHEDULED = {
    "lambda_lr": lambda optimizer: lr.LambdaLR(optimizer, lambda k: 0.9**k),
    "cyclic": lambda optimizer: lr.CyclicLR(optimizer, 0.1, 0.2),
    "plateau": lr.ReduceLROnPlateau,
    "chain": lambda optimizer: lr.SequentialLR(
        optimizer, [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], [1]
    ),
}
MAKERS = {
    "mixed": Mixed,
    "extra": Extra,
    "compiled": lambda: torch.compile(nn.Linear(2, 2)),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
    "never_stepped": lambda: torch.optim.Adam(nn.Linear(2, 2).parameters()),
    "scaler": lambda: torch.amp.GradScaler("cpu", init_scale=2.0 ** torch.randint(9, ()).item()),
    **{name: partial(stepped, getattr(torch.optim, name)) for name in STEPPED},
    **{name: partial(scheduled, make) for name, make in SCHEDULED.items()},
}


def save_and_restore_things(directory):
    torch.manual_seed(0)
    pairs = {name: (make(), make()) for name, make in MAKERS.items()}
    checkpointer = Checkpointer(directory, asynchronous=world().size == 1)
    checkpointer.save(0, **{name: thing for name, (thing, _) in pairs.items()})
    checkpointer.restore(**{name: other for name, (_, other) in pairs.items()})
    states = {n: (thing.state_dict(), other.state_dict()) for n, (thing, other) in pairs.items()}
    return [name for name, (one, other) in states.items() if not equal(one, other)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
def test_whatever_has_a_state_dict_comes_back_with_it(size, tmp_path):
    assert run_caught(save_and_restore_things, tmp_path, world_size=size) == [[]] * size


IMAGINARY = torch.tensor([1 + 2j])
VALUES = {
    "conjugates": [IMAGINARY, IMAGINARY.conj()],  # in one memory
    "far": 2**70,
    "complex": 1j,
    "text": "é\n",
    "nothing": None,
    "data": b"\x00\xff",
    "names": {"b", "a", "c"},
    "nested": {"a": [1, (2, {"b": torch.arange(3)})], 7: "seven", (1, 2): []},
    "part": torch.arange(1000)[10:13],
    "sparse": torch.eye(3).to_sparse(),
    "not_a_number": float("nan"),
    "ordered": OrderedDict(b=1, a=[]),
    "counted": Counter(cat=2, dog=1),
    "trained": nn.Parameter(torch.ones(2)) * 2,
}
SHARED = torch.zeros(3)


def with_a_note(note):
    """Return a state dict as modules make them, which carries something beside its items."""
    state = OrderedDict(weight=torch.ones(1))
    state._metadata = note
    return state


def save_and_return_values(directory, asynchronous):
    checkpointer = Checkpointer(directory, asynchronous=asynchronous)
    noted = with_a_note({"version": 2})
    checkpointer.save(5, **VALUES, noted=noted, shared=[SHARED, {"a": SHARED}])
    found = checkpointer.restore().values
    one, other = found["shared"]
    assert one.data_ptr() == other["a"].data_ptr()
    return {**found, "sparse": found["sparse"].to_dense(), "note": found["noted"]._metadata}


@pytest.mark.parametrize(("size", "asynchronous"), [(1, False), (1, True), (3, True)])
def test_values_come_back_as_they_were_saved(size, asynchronous, tmp_path):
    for found in run_caught(save_and_return_values, tmp_path, asynchronous, world_size=size):
        assert found["note"] == {"version": 2}
        assert type(found["ordered"]) is type(found["noted"]) is OrderedDict
        assert not np.isfinite(found["not_a_number"])
        assert not found["trained"].requires_grad
        assert found["part"].untyped_storage().nbytes() == 3 * 8
        assert list(found)[: len(VALUES)] == list(VALUES)
        for name in VALUES.keys() - {"sparse", "not_a_number"}:
            assert equal(found[name], VALUES[name]), name
        assert equal(found["sparse"], torch.eye(3))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_relative_directory_is_that_of_the_beginning(asynchronous, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer("run", asynchronous=asynchronous)
    writer, loader = MetricWriter("metrics"), cache_dataset([1.5, 2.5], "cache")
    for step in (1, 2):
        checkpointer.save(step, value=step)
        monkeypatch.chdir(tmp_path / "elsewhere")
        writer.write(step, {"loss": 1})
    writer.close()
    checkpointer.wait()
    assert checkpointer.restore().step == Checkpointer(tmp_path / "run").restore().step == 2
    assert Checkpointer(tmp_path / "run").steps() == [1, 2]
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert loader[1] == 2.5


class Unwilling:
    def __reduce_ex__(self, protocol):
        raise OSError


class Marked(torch.Tensor):
    pass


REFUSED = {
    "`x[0]` is": lambda: [Unwilling()],
    "`x` is {'a': 1} (UserDict)": lambda: UserDict(a=1),
    "`x` is Marked([1.]) (Marked)": lambda: torch.ones(1).as_subclass(Marked),
    "`x` is OrderedDict(": lambda: with_a_note({"version": Path("a")}),
    "`x[0][0]` is <class 'object'> (type)": lambda: [dict.fromkeys(range(1000), object)],
}


def save_what_is_refused(directory, only_rank):
    checkpointer = Checkpointer(directory)
    raised = []
    for make in REFUSED.values():
        culprit = make() if world().rank == only_rank else 1
        raised.append(caught(save_values, directory, 1, {"fine": 1, "x": culprit}))
    checkpointer.save(1, x=1)
    return raised, checkpointer.restore()


@pytest.mark.parametrize(("size", "only_rank"), [(1, 0), (3, 1)])
def test_saving_an_object_that_needs_code_raises_on_every_rank(size, only_rank, tmp_path):
    outcomes = run_caught(save_what_is_refused, tmp_path, only_rank, world_size=size)
    for rank, (raised, after) in enumerate(outcomes):
        assert (after.step, after.values) == (1, {"x": 1})
        for text, error in zip(REFUSED, raised, strict=True):
            assert error.type == ("TypeError" if rank == only_rank else "RuntimeError")
            assert text in error.text
            assert "what is saved must be tensors, numbers, strings, dicts, lists and" in error.text
            assert error.text.partition("\n")[0].endswith("): convert it")
            assert len(error.text) < 600


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path):
    def scheduled():
        optimizer = torch.optim.SGD([torch.ones(1)])
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    plateau, again = scheduled(), scheduled()
    plateau.step(np.float64(0.5))
    checkpointer = Checkpointer(tmp_path, keep=np.int64(1), keep_best="f1")
    checkpointer.save(np.int64(1), f1=np.float32(0.5), plateau=plateau, x={"lr": np.float64(0.5)})
    for step in (2, 3):
        checkpointer.save(step, f1=0.25)
    assert checkpointer.steps() == [1, 3]
    values = checkpointer.restore(at=np.int64(1), plateau=again).values
    assert (values, again.best) == ({"f1": 0.5, "x": {"lr": 0.5}}, 0.5)
    assert {*map(type, (*values["x"].values(), values["f1"], again.best))} == {float}


def test_a_tree_that_holds_itself_is_an_error(tmp_path):
    tree = {}
    tree["a"] = tree
    with pytest.raises(RecursionError):
        Checkpointer(tmp_path).save(1, tree=tree)


# --- what is wrong


# What may differ: the buffers of a model, and the order of a set or a dict.
ALIKE = {
    "model": lambda rank: nn.BatchNorm1d(1).requires_grad_(rank > 0),
    "tensor": lambda rank: torch.tensor([float("nan"), 1.0]),
    "set": lambda rank: {"x", "yy", "zzz", "t" * 9, "u" * 7},
    "nan": lambda rank: float("nan"),
}
DIFFERING = [
    (lambda rank: {"a": [1, rank]}, "`x.a.1` differs:\n  rank 0: x.a.1='0'\n  rank 1: x.a.1='1'"),
    (
        lambda rank: torch.ones(1) if rank else 1,
        "x='a Tensor of torch.float32, shape (1,), bits ",
    ),
    (lambda rank: [torch.zeros(1).to(torch.half if rank else torch.float)], "`x.0` differs:"),
    (lambda rank: torch.eye(2).mul(rank).to_sparse(), "`x` differs:"),
    (lambda rank: Thing({"shadow": torch.full((1,), rank)}), "`x.shadow` differs:"),
    (
        lambda rank: nn.Linear(1 + rank, 1),
        "x.weight='a Tensor of torch.float32, shape (1, 2), bits ",
    ),
    (lambda rank: {f"k{rank}": 1}, "rank 0: x.k0='1', x.k1='(nothing)'"),
]


def save_what_differs(directory):
    rank, checkpointer = world().rank, Checkpointer(directory)
    raised = [caught(save_values, directory, 1, {"x": make(rank)}) for make, _ in DIFFERING]
    checkpointer.save(8, **{name: make(rank) for name, make in ALIKE.items()})
    checkpointer.save(9, x=1)
    return raised, checkpointer.restore()


def test_saving_different_values_raises_a_table_on_every_rank(tmp_path):
    for raised, after in run_caught(save_what_differs, tmp_path, world_size=2):
        assert (after.step, after.values) == (9, {"x": 1})
        for (_, text), error in zip(DIFFERING, raised, strict=True):
            assert error.text.startswith("every rank must pass the same to `Checkpointer.save`")
            assert text in error.text
            assert (
                "Pass the same on all ranks, and what each has of its own in `per_rank`"
                in error.text
            )


def test_making_one_touches_nothing(tmp_path):
    Checkpointer(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def keep_what_is_restored(directory):
    torch.manual_seed(0)
    things = {"net": Extra(), "optimizer": stepped(torch.optim.Adam), "thing": Thing([SHARED])}
    things["net"].seen = torch.ones(3)
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, **things, value=SHARED)
    found = checkpointer.restore(**things)
    shutil.rmtree(directory, ignore_errors=True)
    return "state.pt" in Path("/proc/self/maps").read_text(), things["net"].seen.tolist(), found


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_that_was_restored_lies_in_the_file(size, tmp_path):
    for mapped, seen, _ in run_caught(keep_what_is_restored, tmp_path / "run", world_size=size):
        assert (mapped, seen) == (False, [1, 1, 1])


def resume_on_another_default_device(directory):
    torch.set_default_device("meta")
    try:
        torch.manual_seed(1)
        before = torch.get_rng_state()
        checkpointer = Checkpointer(directory)
        checkpointer.save(1, position=Position(3), per_rank={"x": torch.ones(1, device="cpu")})
        torch.manual_seed(2)
        found = Checkpointer(directory).restore(position=Position()).values["x"]
        return found.item(), torch.equal(torch.get_rng_state(), before)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_of_a_checkpoint_depends_on_the_default_device(size, tmp_path):
    found = run_caught(resume_on_another_default_device, tmp_path, world_size=size)
    assert found == [(1, True)] * size


def test_a_folder_with_a_colon_is_no_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Checkpointer("run:/x").save(1, value=2)
    assert (tmp_path / "run:" / "x").is_dir()


# --- in part


def test_a_part_of_what_was_saved_can_be_restored(tmp_path):
    saved, critic, other = (nn.Linear(2, 2) for _ in range(3))
    optimizer = torch.optim.Adam(saved.parameters())
    Checkpointer(tmp_path).save(4, generator=other, critic=saved, optimizer=optimizer, best=1)
    found = Checkpointer(tmp_path).restore(critic=critic)
    assert (found.step, found.values) == (4, {"best": 1})
    assert fingerprint(critic) == fingerprint(saved)


def restore_other_groups(directory):
    model, checkpointer = nn.Linear(2, 2), Checkpointer(directory)
    checkpointer.save(1, model=model, zopt=torch.optim.SGD(model.parameters(), lr=0.1))
    checkpointer.restore(model=model, zopt=torch.optim.SGD([model.weight], lr=0.1))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_state_that_does_not_fit_raises_on_every_rank(size, tmp_path):
    for error in run_caught(restore_other_groups, tmp_path, world_size=size):
        assert error.type == "RuntimeError"
        assert (
            "the state of `zopt` must fit this SGD, but does not (ValueError: loaded" in error.text
        )
        assert error.text.endswith("make all objects anew, as they were saved")


class Stateless(nn.Linear):
    def state_dict(self, *args, **options):
        if world().rank == world().size - 1:
            raise OSError("no state")
        return super().state_dict(*args, **options)


def restore_what_cannot_be_looked_at(directory):
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, net=nn.Linear(2, 2))
    raised = caught(lambda: checkpointer.restore(net=Stateless(2, 2)))
    return raised, all_reduce_sum(1)


@pytest.mark.parametrize("size", [2, 3])
def test_a_failing_state_dict_on_one_rank_raises_on_every_rank(size, tmp_path):
    *others, last = run(restore_what_cannot_be_looked_at, tmp_path, world_size=size)
    assert (last[0].type, last[0].text) == ("OSError", "no state")
    text = f"rank {size - 1} failed in `Checkpointer.restore`: OSError: no state\n(seen on rank"
    assert all(raised.text.startswith(text) for raised, _ in others)
    assert {total for _, total in (*others, last)} == {size}

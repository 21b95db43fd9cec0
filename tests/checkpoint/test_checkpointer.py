"""What is saved under one strategy and size is restored under any other, and training goes on."""

import logging
import random
import shutil
from collections import OrderedDict, UserDict
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from alike import equal
from checkpoint_zoo import STRATEGIES, Net, Run, Thing, paths
from logged import log_of
from on_ranks import caught, run, run_caught
from sharding import FSDP_ON_CPU
from torch import nn

from pardata import Checkpointer, fingerprint, load_weights, world
from pardata.checkpoint._files import verified


def strategies():
    """Return those that this torch has in this world."""
    skipped = {"dp"} if world().size > 1 else set()
    return [s for s in STRATEGIES if s not in skipped and (FSDP_ON_CPU or s != "fsdp")]


def exported(directory, strategy):
    kinds = ["pt", "safetensors"] if find_spec("safetensors") else ["pt"]
    return [Path(directory) / strategy / f"weights.{kind}" for kind in kinds]


def save_each(directory, optimizer, asynchronous):
    """Return, by strategy, digests of all that was saved, and of the weights that were exported."""
    digests = {}
    for strategy in strategies():
        trained = Run(strategy, optimizer).train(3)
        checkpointer = Checkpointer(f"{directory}/{strategy}", asynchronous=asynchronous)
        checkpointer.save(3, **trained.objects(), best=0.5)
        digests[strategy] = trained.digest(), fingerprint(trained.model)
        if asynchronous:
            trained.train(1)
        for file in exported(directory, strategy):
            checkpointer.export(file)
    return digests


def restore_each(directory, optimizer):
    found = {}
    for before in sorted(path.name for path in Path(directory).iterdir()):
        for after in strategies():
            fresh = Run(after, optimizer, seed=7)
            values = Checkpointer(f"{directory}/{before}").restore(**fresh.objects())
            digest = fresh.digest()
            fresh.train(1)
            weights = []
            for file in exported(directory, before):
                load_weights(fresh.model, file)
                weights.append(fingerprint(fresh.model))
            found[before, after] = values, digest, set(weights)
    return found


def check_every_strategy_into_every_other(directory, sizes_before, sizes_after, **how):
    optimizer = how.get("optimizer", "adam")
    for before in sizes_before:
        folder = f"{directory}/{before}"
        saved = run(save_each, folder, optimizer, how.get("asynchronous", False), world_size=before)
        for strategy, (_, weights) in saved[0].items():
            [checkpoint] = paths(Path(folder) / strategy)
            assert verified(checkpoint, 3)["identity"]["strategies"] == {"model": strategy}
            plain = Net()
            plain.load_state_dict(torch.load(exported(folder, strategy)[0], weights_only=True))
            assert fingerprint(plain) == weights
        for after in sizes_after:
            for found in run(restore_each, folder, optimizer, world_size=after):
                for (strategy, _), (values, digest, exports) in found.items():
                    assert (values.step, values.values) == (3, {"best": 0.5})
                    assert (digest, *exports) == saved[0][strategy]


def test_every_strategy_at_2_processes_is_restored_under_every_other_at_1_and_3(tmp_path):
    check_every_strategy_into_every_other(tmp_path, [2], [1, 3])


@pytest.mark.soak
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_every_strategy_at_every_size_is_restored_under_every_other(
    optimizer, asynchronous, tmp_path
):
    sizes = [1, 2, 4]
    check_every_strategy_into_every_other(
        tmp_path, sizes, sizes, optimizer=optimizer, asynchronous=asynchronous
    )


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


def test_an_exact_run_goes_on_to_the_bit_at_any_other_size(tmp_path):
    [(expected, _)] = run(train_on, "exact", None, 9, None, world_size=1)
    stages = [
        (2, None, tmp_path / "a"),
        (3, tmp_path / "a", tmp_path / "b"),
        (1, tmp_path / "b", None),
    ]
    for size, before, after in stages:
        told = run(train_on, "exact", before, 3, after, world_size=size)
    assert [digest for digest, _ in told] == [expected]


@pytest.mark.parametrize(("strategy", "size"), [("none", 1), ("ddp", 2), ("fsdp", 3)])
def test_at_the_same_size_a_run_goes_on_to_the_bit_with_the_generators_of_every_rank(
    strategy, size, tmp_path
):
    if strategy == "fsdp" and not FSDP_ON_CPU:
        pytest.skip("torch 2.6 shards on GPUs only")
    run(train_on, strategy, None, 3, tmp_path, world_size=size)
    expected = run(train_on, strategy, None, 6, None, world_size=size)
    assert run(train_on, strategy, tmp_path, 3, None, world_size=size) == expected
    assert len({number for _, number in expected}) == size


def save_values(directory, step, values):
    Checkpointer(directory).save(step, **values)


def restore_generators_and_log(directory):
    torch.manual_seed(50 + world().rank)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(50 + world().rank))
    with log_of("pardata", logging.INFO) as log:
        Checkpointer(directory).restore()
    left = torch.equal(torch.rand(1), expected)
    return left, [line for line in log.lines if "generators" in line]


def test_at_another_size_the_generators_are_left_alone_and_it_is_said_once(tmp_path):
    run(save_values, tmp_path, 1, {}, world_size=2)
    told = "[0/3] default generators are not restored: 2 process(es) saved theirs, not 3"
    assert run(restore_generators_and_log, tmp_path, world_size=3) == [
        (True, [told] if rank == 0 else []) for rank in range(3)
    ]
    assert run(restore_generators_and_log, tmp_path, world_size=2) == [(False, [])] * 2


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
    "one_cycle": lambda optimizer: lr.OneCycleLR(optimizer, 0.2, total_steps=9),
    "cyclic": lambda optimizer: lr.CyclicLR(optimizer, 0.1, 0.2),
    "cosine": lambda optimizer: lr.CosineAnnealingWarmRestarts(optimizer, 3),
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
    "number": 3,
    "far": 2**70,
    "infinite": float("inf"),
    "complex": 1j,
    "yes": True,
    "text": "é\n",
    "nothing": None,
    "data": b"\x00\xff",
    "names": {"b", "a", "c"},
    "nested": {"a": [1, (2, {"b": torch.arange(3)})], 7: "seven", (1, 2): []},
    "part": torch.arange(1000)[10:13],
    "sparse": torch.eye(3).to_sparse(),
    "not_a_number": float("nan"),
    "ordered": OrderedDict(b=1, a=[]),
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
    own = {"mapping": UserDict(a=UserDict(b=1)), "noted": with_a_note({"version": 2})}
    checkpointer.save(5, **VALUES, **own, shared=[SHARED, {"a": SHARED}])
    found = checkpointer.restore().values
    one, other = found["shared"]
    assert one.data_ptr() == other["a"].data_ptr()
    return {**found, "sparse": found["sparse"].to_dense(), "note": found["noted"]._metadata}


@pytest.mark.parametrize(("size", "asynchronous"), [(1, False), (1, True), (3, True)])
def test_values_come_back_as_they_were_saved(size, asynchronous, tmp_path):
    for found in run_caught(save_and_return_values, tmp_path, asynchronous, world_size=size):
        assert (found["mapping"], found["note"]) == ({"a": {"b": 1}}, {"version": 2})
        assert type(found["ordered"]) is type(found["noted"]) is OrderedDict
        assert not np.isfinite(found["not_a_number"])
        assert not found["trained"].requires_grad
        assert found["part"].untyped_storage().nbytes() == 3 * 8
        assert list(found)[: len(VALUES)] == list(VALUES)
        for name in VALUES.keys() - {"sparse", "not_a_number"}:
            assert equal(found[name], VALUES[name]), name
        assert equal(found["sparse"], torch.eye(3))


class Unwilling:
    def __reduce_ex__(self, protocol):
        raise OSError


class Marked(torch.Tensor):
    pass


REFUSED = {
    f"`x['lr']` is {np.float64(0.5)!r} (numpy.float64)": lambda: {"lr": np.float64(0.5)},
    "`x[0]` is": lambda: [Unwilling()],
    "`x` is Marked([1.]) (test_checkpointer.Marked)": lambda: torch.ones(1).as_subclass(Marked),
    "`x[0]['a'][0]` is {PosixPath('a'): 1} (builtins.dict)": lambda: [{"a": ({Path("a"): 1},)}],
    "`x` is OrderedDict(": lambda: with_a_note({"version": Path("a")}),
    "`x['a']` is [...] (builtins.int)": lambda: {"a": 2**3000},
    "`x[0][0]` is <class 'object'> (builtins.type)": lambda: [dict.fromkeys(range(1000), object)],
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
def test_what_could_be_loaded_only_by_running_code_is_refused_on_every_rank_by_its_path(
    size, only_rank, tmp_path
):
    outcomes = run_caught(save_what_is_refused, tmp_path, only_rank, world_size=size)
    for rank, (raised, after) in enumerate(outcomes):
        assert (after.step, after.values) == (1, {"x": 1})
        for text, error in zip(REFUSED, raised, strict=True):
            assert error.type == ("TypeError" if rank == only_rank else "RuntimeError")
            assert text in error.text
            assert "what is saved must be tensors, numbers, strings, and dicts, lists" in error.text
            assert "leave it out; it would have to run code when it is loaded" in error.text
            assert len(error.text) < 600


def test_a_tree_that_holds_itself_is_an_error(tmp_path):
    tree = {}
    tree["a"] = tree
    with pytest.raises(RecursionError):
        Checkpointer(tmp_path).save(1, tree=tree)


# --- what is wrong


# What may differ: the bits of tensors, and the order in which a set or a dict is gone through.
ALIKE = {
    "tensor": lambda rank: torch.ones(1 + rank) * rank,
    "set": lambda rank: {"x", "yy", "zzz", "t" * 9, "u" * 7},
    "nan": lambda rank: float("nan"),
}
DIFFERING = [
    (lambda rank: {"a": [1, rank]}, "`x.a.1` differs:\n  rank 0: x.a.1='0'\n  rank 1: x.a.1='1'"),
    (lambda rank: torch.ones(1) if rank else 1, "x='a Tensor'"),
    (lambda rank: {f"k{rank}": 1}, "rank 0: x.k0='1', x.k1='(nothing)'"),
    (lambda rank: 1 if rank else 1.0, "rank 0: x='1.0'\n  rank 1: x='1'"),
]


def save_what_differs(directory):
    rank, checkpointer = world().rank, Checkpointer(directory)
    raised = [caught(save_values, directory, 1, {"x": make(rank)}) for make, _ in DIFFERING]
    checkpointer.save(8, **{name: make(rank) for name, make in ALIKE.items()})
    checkpointer.save(9, x=1)
    return raised, checkpointer.restore()


def test_ranks_that_pass_what_differs_are_told_on_every_rank_with_a_table(tmp_path):
    for raised, after in run_caught(save_what_differs, tmp_path, world_size=2):
        assert (after.step, after.values) == (9, {"x": 1})
        for (_, text), error in zip(DIFFERING, raised, strict=True):
            assert error.text.startswith("every rank must pass the same to `Checkpointer.save`")
            assert text in error.text


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


# --- in part


def test_a_part_of_what_was_saved_can_be_restored(tmp_path):
    saved, critic, other = (nn.Linear(2, 2) for _ in range(3))
    optimizer = torch.optim.Adam(saved.parameters())
    Checkpointer(tmp_path).save(4, generator=other, critic=saved, optimizer=optimizer, best=1)
    found = Checkpointer(tmp_path).restore(critic=critic)
    assert (found.step, found.values) == (4, {"best": 1})
    assert fingerprint(critic) == fingerprint(saved)


def test_the_state_of_another_kind_of_thing_is_refused_by_name(tmp_path):
    model = nn.Linear(2, 2)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model=model)
    text = r"the state of `model` is not that of a SGD \(KeyError: 'param_groups'\)"
    with pytest.raises(RuntimeError, match=text):
        checkpointer.restore(model=torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_file_in_a_checkpoint_is_none_of_weights_and_the_error_names_what_writes_one(tmp_path):
    checkpointer, model = Checkpointer(tmp_path / "run"), nn.Linear(2, 2)
    checkpointer.save(1, model=model)
    (inside,) = tmp_path.glob("run/*/state.pt")
    text = r"but 'objects' holds a dict: if this is a checkpoint of a Checkpointer, pass the file "
    with pytest.raises(TypeError, match=text + r"of weights that its export\(\) writes"):
        load_weights(model, inside)
    checkpointer.export(tmp_path / "weights.pt")
    load_weights(model, tmp_path / "weights.pt")

"""What each rank has of its own: saved by each, restored on as many ranks, or told."""

import logging
from pathlib import Path

import pytest
import torch
from common_checkpoint import Thing, leftovers, limited, paths, sharded, whole_steps
from logged import log_of
from on_ranks import caught, run, run_caught
from torch import nn

from pardata import Checkpointer, world
from pardata.checkpoint._manifest import verified


class Rows(Thing):
    """A loader of another library, whose position is another on each rank."""

    def __iter__(self):
        return iter(())


def own_things(rank):
    hidden = torch.arange(2.0 + rank) + rank
    return {
        "hidden": [hidden, {"steps": rank}],
        "buffer": Thing({"rows": torch.full((rank, 2), rank), "next": rank}),
        "rows": Rows({"at": 10 + rank}),
        "critic": nn.Linear(1 + rank, 1),
    }


def save_own(directory, asynchronous):
    rank = world().rank
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    torch.manual_seed(rank)
    checkpointer = Checkpointer(directory, keep=2, keep_best="best", asynchronous=asynchronous)
    for step in range(4):
        own = own_things(rank)
        own["hidden"][0] += step
        checkpointer.save(step, best=-step, model=model, per_rank=own)
        own["hidden"][0].zero_()  # what is saved is what there was
        own["buffer"].state["rows"].zero_()
    return checkpointer.steps(), [p.tolist() for p in own["critic"].parameters()]


def restore_own(directory):
    found = {
        "buffer": Thing("left"),
        "rows": Rows("left"),
        "critic": nn.Linear(1 + world().rank, 1),
    }
    with log_of("pardata", logging.WARNING) as log:
        restored = Checkpointer(directory).restore(**found, model=nn.Linear(2, 2))
    weights = [p.tolist() for p in found["critic"].parameters()]
    return restored, found["buffer"].state, found["rows"].state, weights, log.lines


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_per_rank_values_are_restored_only_at_the_same_size(size, asynchronous, tmp_path):
    saved = run_caught(save_own, tmp_path, asynchronous, world_size=size)
    assert whole_steps(tmp_path) == [0, 2, 3]
    files = [f"rank-{rank:05d}.pt" for rank in range(size)]
    for path in paths(tmp_path):
        assert sorted(file.name for file in path.iterdir()) == ["manifest.json", *files, "state.pt"]
        assert {*files} < verified(path, int(path.name[-1]))["files"].keys()
    for rank, found in enumerate(run_caught(restore_own, tmp_path, world_size=size)):
        restored, buffer, rows, critic, lines = found
        hidden, more = restored.values["hidden"]
        assert (restored.step, restored.values["best"], more) == (3, -3, {"steps": rank})
        assert hidden.tolist() == (torch.arange(2.0 + rank) + rank + 3).tolist()
        assert buffer["rows"].tolist() == [[rank, rank]] * rank
        assert (buffer["next"], rows, lines) == (rank, {"at": 10 + rank}, [])
        assert (saved[rank][0], critic) == ([0, 2, 3], saved[rank][1])
    other = 3 - size or 1
    told = (
        f"pardata restored no `hidden`, `buffer`, `rows`, `critic`: each of {size} process(es) "
        f"saved its own, now there are {other}"
    )
    for rank, found in enumerate(run_caught(restore_own, tmp_path, world_size=other)):
        restored, buffer, rows, _, lines = found
        assert (restored.values, buffer, rows) == ({"best": -3}, "left", "left")
        assert [line.removeprefix(f"[0/{other}] ") for line in lines] == [told] * (rank == 0)


def test_a_damaged_file_of_any_rank_skips_the_checkpoint(tmp_path):
    run_caught(save_own, tmp_path, False, world_size=3)
    newest, older = paths(tmp_path)[::-1][:2]
    (newest / "rank-00002.pt").unlink()
    file = older / "rank-00001.pt"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    for size in (1, 3):
        for rank, found in enumerate(run_caught(restore_own, tmp_path, world_size=size)):
            assert found[0].step == 0
            if rank == 0:
                assert "because rank-00002.pt is missing" in found[-1][0]
                assert "because the checksum of rank-00001.pt is wrong" in found[-1][1]


def save_without_room(directory, asynchronous):
    checkpointer = Checkpointer(directory, asynchronous=asynchronous)
    checkpointer.save(1, per_rank={"own": world().rank})
    checkpointer.wait()
    freed = limited() if world().rank == 1 else int

    def save():
        checkpointer.save(2, per_rank={"own": torch.zeros(1_200_000 * world().rank)})
        checkpointer.wait()

    error = caught(save)
    freed()
    left = checkpointer.steps(), leftovers(Path(directory))
    checkpointer.save(3, per_rank={"own": world().rank + 10})
    return error, left, checkpointer.restore().values


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_write_error_on_one_rank_raises_on_every_rank(asynchronous, tmp_path):
    found = run_caught(save_without_room, tmp_path, asynchronous, world_size=2, fresh=True)
    for rank, (error, left, values) in enumerate(found):
        assert error.type == "OSError"
        assert (
            "every rank must write what it has of its own, but not all could: rank 1: OSError(27"
            in (error.text)
        )
        assert (left, values) == (([1], []), {"own": rank + 10})


def code():
    return lambda: None


WRONG = [
    (lambda rank: {f"own{rank}": 1}, "RuntimeError", "`per_rank` differs:\n  rank 0: per_rank=["),
    (lambda rank: {"own": code()} if rank else {"own": 1}, "", "but `own` is <function code"),
]


def save_what_is_wrong(directory):
    checkpointer = Checkpointer(directory)
    raised = []
    for make, _, _ in WRONG:
        save = lambda make=make: checkpointer.save(1, best=1, per_rank=make(world().rank))  # noqa: E731
        raised.append(caught(save))
    checkpointer.save(2, best=1, per_rank={})
    return raised, checkpointer.restore().values


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_wrong_with_it_is_said_on_every_rank(size, tmp_path):
    for raised, values in run_caught(save_what_is_wrong, tmp_path, world_size=size):
        assert values == {"best": 1}
        for (_, kind, text), error in zip(WRONG, raised, strict=True):
            assert error.type == (kind or error.type)
            assert text in error.text


def save_a_sharded_value(directory):
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, whole=sharded(torch.arange(5.0)), per_rank={"own": world().rank})
    return checkpointer.restore().values


def test_a_value_that_is_sharded_comes_back_whole(tmp_path):
    for rank, values in enumerate(run_caught(save_a_sharded_value, tmp_path, world_size=2)):
        assert (values["whole"].tolist(), values["own"]) == ([0, 1, 2, 3, 4], rank)


def test_a_script_with_one_process_saves_and_restores_it_too(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, per_rank={"hidden": torch.ones(2)})
    assert checkpointer.restore().values["hidden"].tolist() == [1, 1]
    assert run(restore_values, tmp_path, world_size=2) == [{}, {}]


def restore_values(directory):
    return Checkpointer(directory).restore().values

"""What belongs to a run and not to one object: optimizers, gradients, numbers drawn in a body."""

import random
import tempfile

import numpy as np
import pytest
import torch
from logged import log_of
from on_ranks import caught, run
from torch import nn
from torch.utils.data import random_split

from pardata import Checkpointer, backward, make_loader, seed_everything, world, wrap_model

SIZES = [1, 2, 3]
DATA = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def loss_fn(model, x):
    return model(x).square().mean()


def folder():
    return tempfile.mkdtemp()


# --- optimizers


class OfOneRank(torch.optim.SGD):
    """Each rank holds all buffers, and keeps one of them up to date, as Muon does."""

    def step(self):
        parameters = self.param_groups[0]["params"]
        for number, parameter in enumerate(parameters):
            buffer = self.state[parameter].setdefault("buffer", torch.zeros(4, 4))
            if number % world().size == world().rank:
                buffer.add_(1)


def saved_from_one_rank(directory):
    optimizer = OfOneRank([nn.Parameter(torch.zeros(4, 4)) for _ in range(2)])
    checkpointer = Checkpointer(directory)
    optimizer.step()
    error = str(caught(lambda: checkpointer.save(1, optimizer=optimizer)))
    return error, checkpointer.steps()


@pytest.mark.parametrize("size", [2, 3])
def test_an_optimizer_that_ranks_share_is_not_saved(size):
    for error, steps in run(saved_from_one_rank, folder(), world_size=size):
        assert "but `optimizer.state.0.buffer`, `optimizer.state.1.buffer` differ" in error
        assert steps == []
    for error, steps in run(saved_from_one_rank, folder(), world_size=1):
        assert (error, steps) == ("None", [1])


def in_order(directory, orders):
    """Save with the parameters in one order on each rank, or restore with it."""
    net = wrap_model(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))))
    parameters = list(net.parameters())
    order = orders[world().rank % len(orders)]
    run = {"model": net, "optimizer": torch.optim.Adam([parameters[n] for n in order])}
    backward(net, loss_fn, torch.ones(2, 4))
    run["optimizer"].step()
    run["optimizer"].zero_grad()
    checkpointer = Checkpointer(directory)
    if checkpointer.steps():
        return str(caught(lambda: checkpointer.restore(**run)))
    return str(caught(lambda: checkpointer.save(1, **run)))


@pytest.mark.parametrize("size", SIZES)
def test_the_order_of_the_parameters_must_be_that_of_the_save(size):
    directory = folder()
    assert run(in_order, directory, [(0, 1, 2)], world_size=size) == ["None"] * size
    for error in run(in_order, directory, [(2, 1, 0)], world_size=size):
        text = (
            "`optimizer` must keep their order, but number 0 was `model.0.weight` and is `model.2"
        )
        assert text in error
    assert "Restored" in run(in_order, directory, [(0, 1, 2)], world_size=size)[0]


def test_ranks_with_other_orders_cannot_save():
    for error in run(in_order, folder(), [(0, 1, 2), (0, 2, 1)], world_size=2):
        assert "but `parameter 1 of optimizer`, `parameter 2 of optimizer`, " in error
        assert "rank 1: parameter 1 of optimizer='model.2.weight'" in error


# --- weights and gradients


def saved_with_unlike_weights(directory):
    net = wrap_model(nn.Linear(4, 4))
    net.module.bias.data += world().rank
    return str(caught(lambda: Checkpointer(directory).save(1, model=net)))


def test_replicas_that_differ_are_not_saved():
    for error in run(saved_with_unlike_weights, folder()):
        assert "but `model.bias` differs" in error


def saved_between(directory, strategy):
    """Return how many lines each save of a model logs: after steps, and within an accumulation."""
    net = wrap_model(nn.Linear(4, 4), strategy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    checkpointer, lines = Checkpointer(directory), []
    with log_of() as log:

        def save():
            checkpointer.save(len(lines), model=net, optimizer=optimizer)
            lines.append(sum("has unused gradients" in line for line in log.lines))

        save()
        (batch,) = make_loader(DATA, 64, microbatch_size=16, num_workers=0)
        backward(net, loss_fn, batch)
        optimizer.step()
        save()  # before zero_grad
        optimizer.zero_grad()
        save()
        backward(net, loss_fn, batch)
        save()
    return lines


@pytest.mark.parametrize("strategy", ["auto", "exact"])
@pytest.mark.parametrize("size", SIZES)
def test_a_save_within_an_accumulation_is_warned_of(size, strategy):
    found = run(saved_between, folder(), strategy, world_size=size, fresh=True)
    assert found == [[0, 0, 0, int(rank == 0)] for rank in range(size)]


# --- the loader's samples


def split(directory, seed):
    train, _ = random_split(DATA, [48, 16], generator=torch.Generator().manual_seed(seed))
    loader = make_loader(train, 8, num_workers=0)
    checkpointer = Checkpointer(directory)
    if checkpointer.steps():
        return str(caught(lambda: checkpointer.restore(loader=loader)))
    checkpointer.save(1, loader=loader)
    return loader.state_dict()["samples"]


@pytest.mark.parametrize("size", SIZES)
def test_a_split_that_is_drawn_anew_is_refused(size):
    directory = folder()
    (saved, *_) = run(split, directory, 0, world_size=size)
    assert len(saved) == 16
    for error in run(split, directory, 1, world_size=size):
        assert f"samples was '{saved}' and is '" in error
    assert "Restored" in run(split, directory, 0, world_size=size)[0]


def test_a_dataset_that_lists_nothing_says_so():
    assert make_loader(range(8), 4).state_dict()["samples"] == "nothing"


# --- numbers drawn in the body of an epoch


def numbers():
    return random.random(), np.random.random(), torch.rand(1).item()  # noqa: NPY002  # the default


def drawn(directory, stops):
    """Return the numbers of each epoch's body, and of its steps, which the model sees."""
    seed_everything(0)
    loader = make_loader(DATA, 16, seed=0, num_workers=0)
    checkpointer, found = Checkpointer(directory), []
    checkpointer.restore(loader=loader)
    step = 0
    if loader.state_dict()["delivered"]:
        random.random()  # what stands before the loop changes nothing in it
    for epoch in loader.epochs(3):
        found.append((epoch, "body", *numbers()))
        for number, _ in enumerate(loader, loader.state_dict()["delivered"] // 16):
            step += 1
            found.append((epoch, number, *numbers()))
            if step == stops:
                checkpointer.save(1, loader=loader)
                return found
        found.append((epoch, "end", random.random()))
        if stops and step == -stops:
            checkpointer.save(1, loader=loader)
            return found
    return found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stops", [2, 4, 5, -4])
def test_a_resumed_body_draws_what_it_has_drawn(size, stops):
    whole = run(drawn, folder(), 0, world_size=size)
    directory = folder()
    first = run(drawn, directory, stops, world_size=size)
    rest = run(drawn, directory, 0, world_size=size)
    for all_, before, after in zip(whole, first, rest, strict=True):
        assert before == all_[: len(before)]
        began = after[0][0]
        body = [row for row in all_ if row[0] == began and row[1] == "body"]
        later = [row for row in all_[len(before) :] if (row[0], row[1]) != (began, "body")]
        assert after == body + later

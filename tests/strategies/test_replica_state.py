"""What the ranks hold is compared in the steps: weights, modes, trained parameters, the seed."""

import pytest
import torch
from on_ranks import caught, run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from pardata import (
    backward,
    check_in_sync,
    fingerprint,
    load_weights,
    make_loader,
    seed_everything,
    unwrap,
    world,
    wrap_model,
)

SIZES = [2, 3]
WAYS = [("ddp", "backward"), ("ddp", "loss.backward"), ("exact", "backward"), ("ddp", "plain")]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.dropout(self.first(x).relu()))


def loss_fn(model, x):
    return model(x).square().mean()


class Training:
    """A model, an optimizer, and steps in one of three ways."""

    def __init__(self, strategy, how, **options):
        seed_everything(0)
        self.how = how
        self.model = wrap_model(Net(), strategy, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        micro = None if how == "plain" else 2
        data = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
        self.loader = make_loader(data, 12, microbatch_size=micro, num_workers=0)

    def step(self):
        for batch in self.loader:
            if self.how == "loss.backward":
                loss_fn(self.model, batch[0]).backward()
            else:
                backward(self.model, loss_fn, batch)
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def net(self):
        return unwrap(self.model)

    def errors(self, steps):
        return [str(caught(self.step)) for _ in range(steps)]


def changed_at_the_start(strategy, how, name):
    training = Training(strategy, how)
    CHANGES[name][0](training)
    return training.errors(3)


def initialized(training):
    torch.manual_seed(world().rank)
    training.net.first.reset_parameters()


def loaded_on_rank_0(training):
    if world().is_main:
        training.net.load_state_dict(Net().state_dict())


def unlike_rates(training):
    training.optimizer.param_groups[0]["lr"] *= 1 + world().rank


def one_optimizer(training):
    if world().rank:
        training.optimizer.step = lambda: None


def averages_swapped_in(training):
    average = torch.optim.swa_utils.AveragedModel(training.net)
    for parameter in average.parameters():
        parameter.data.mul_(0.5)
    if world().is_main:
        training.net.load_state_dict(average.module.state_dict())


def pruned(training):
    if world().rank:
        training.net.last.weight.data[0, 3] = 0


def in_eval_mode(training):
    if world().is_main:
        training.net.dropout.eval()


def seeded_by_rank(_):
    seed_everything(world().rank)


def frozen_by_rank(training):
    if world().is_main:
        training.net.last.requires_grad_(False)


# What it does, the step whose error names it, and what the error names.
CHANGES = {
    "init on each rank": (initialized, 1, "but `first.weight`, `first.bias` differ"),
    "load on rank 0": (loaded_on_rank_0, 1, "`first.weight`, `first.bias`, `last.weight` and 1"),
    "averages on rank 0": (averages_swapped_in, 1, "`first.weight`, `first.bias`, `last.weight`"),
    "one number pruned": (pruned, 1, "but `last.weight` differs"),
    "rates of ranks": (unlike_rates, 2, "`first.weight`, `first.bias`, `last.weight` and 1"),
    "steps on one rank": (one_optimizer, 2, "`first.weight`, `first.bias`, `last.weight`"),
    "a mode": (
        in_eval_mode,
        1,
        "but `dropout.training` differs:\n  rank 0: dropout.training=False",
    ),
    "seeds of ranks": (seeded_by_rank, 1, "but `the seed of seed_everything` differs"),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("strategy", "how"), WAYS)
def test_a_replica_that_differs_is_an_error_on_every_rank(strategy, how, size):
    for name, (_, number, text) in CHANGES.items():
        for errors in run(changed_at_the_start, strategy, how, name, world_size=size):
            assert errors[: number - 1] == ["None"] * (number - 1), name
            assert text in errors[number - 1], name
            assert f"This is step {number} of the model" in errors[number - 1], name


def frozen(strategy):
    training = Training(
        strategy, "backward", **({"find_unused_parameters": True} if strategy == "ddp" else {})
    )
    frozen_by_rank(training)
    return training.errors(1)


@pytest.mark.parametrize("strategy", ["ddp", "exact"])
def test_a_parameter_that_is_frozen_on_one_rank_is_an_error(strategy):
    for (error,) in run(frozen, strategy):
        assert "`last.weight.requires_grad`, `last.bias.requires_grad` differ" in error


def changed_late(strategy, how):
    training = Training(strategy, how)
    for _ in range(40):
        training.step()
    if world().is_main:
        training.net.last.bias.data += 1e-6
    return training.errors(24)


@pytest.mark.parametrize(("strategy", "how"), WAYS[:3])
def test_weights_that_drift_apart_later_are_found_in_a_64th_step(strategy, how):
    for errors in run(changed_late, strategy, how):
        assert errors[:23] == ["None"] * 23
        assert "but `last.bias` differs" in errors[23]


def mended(strategy, how):
    """Return whether an error leaves gradients and weights, and training goes on after a mend."""
    training = Training(strategy, how)
    kept = {name: value.clone() for name, value in training.net.state_dict().items()}
    initialized(training)
    before = fingerprint(training.model)
    training.optimizer.step = lambda: None
    raised = "first.weight" in str(caught(training.step))
    left = fingerprint(training.model) == before
    left &= how == "loss.backward" or all(p.grad is None for p in training.model.parameters())
    load_weights(training.model, kept)
    del training.optimizer.step
    training.optimizer.zero_grad()
    found = training.errors(3)
    check_in_sync(training.model)
    return raised, left, found


@pytest.mark.parametrize(("strategy", "how"), WAYS)
def test_the_error_leaves_gradients_and_weights_and_can_be_mended(strategy, how):
    assert run(mended, strategy, how) == [(True, True, ["None"] * 3)] * 2


def allowed(case):
    """Train replicas that may differ."""
    if case == "ignored":
        seed_everything(0)
        net = Net()
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            net, ["last.bias"]
        )
        training = Training("ddp", "backward")
        training.model = wrap_model(net, "ddp")
        net.last.bias.requires_grad_(False)
        net.last.bias.data += world().rank
    elif case == "a hook":
        training = Training("ddp", "backward")
        training.model.register_comm_hook(None, allreduce_hook)
        training.net.last.bias.data += world().rank
    else:  # shards
        training = Training("fsdp", "backward")
    return training.errors(4)


@pytest.mark.parametrize("case", ["ignored", "a hook", "shards"])
def test_replicas_that_may_differ_are_let_alone(case):
    assert run(allowed, case, fresh=case == "a hook") == [["None"] * 4] * 2


def evaluated_on_rank_0(how):
    """Return the errors of steps between which rank 0 alone runs forwards with gradients."""
    training, errors = Training("ddp", how), []
    for _ in range(5):
        if world().is_main:
            loss_fn(unwrap(training.model), torch.ones(2, 4))
        errors += training.errors(1)
    return errors


@pytest.mark.parametrize("how", ["backward", "loss.backward"])
def test_forwards_on_one_rank_do_not_count_as_steps(how):
    assert run(evaluated_on_rank_0, how) == [["None"] * 5] * 2


def with_a_compiled_part(strategy):
    seed_everything(0)
    net = Net()
    net.first = torch.compile(net.first, backend="eager", dynamic=False)
    model = wrap_model(net, strategy)
    (batch,) = make_loader(torch.ones(12, 4), 12, microbatch_size=2, num_workers=0)
    return backward(model, loss_fn, batch).item()


@pytest.mark.parametrize("strategy", ["ddp", "exact"])
def test_a_part_may_be_compiled(strategy):
    first, second = run(with_a_compiled_part, strategy, world_size=2)
    assert first == second

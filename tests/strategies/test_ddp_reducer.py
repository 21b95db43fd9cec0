"""DDP after a failed step is right, and replicas that would drift apart are an error."""

import pytest
import torch
from on_ranks import caught, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pardata import backward, check_in_sync, unwrap, world, wrap_model

HOWS = ["backward", "loss.backward"]
ADDED = "but `{}` was added or exchanged"
CONVERTED = "but `0.weight` was torch.float32 on cpu and is {} on cpu"


def loss_of(model, batch):
    return model(batch).square().mean()


def train(model, batch, how):
    if how == "backward":
        backward(model, loss_of, batch)
    else:
        loss_of(model, batch).backward()


# --- after an error that every rank raises and catches


class Failing(torch.autograd.Function):
    fails = False

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        if Failing.fails:
            raise ValueError("out of memory, say")
        return gradient


class Wide(nn.Module):
    """Its last layer's gradient is being reduced when the backward of the first one fails."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 1000), nn.Linear(1000, 1000)

    def forward(self, x):
        return self.last(Failing.apply(self.first(x)))


def gradients_after_an_error(options, hook):
    torch.manual_seed(0)
    net = Wide()
    model = DistributedDataParallel(net) if options is None else wrap_model(net, "ddp", **options)
    if options and "find_unused_parameters" in options:
        net.last.bias.requires_grad_(False)  # after wrapping
    if hook:
        model.register_comm_hook(None, halved)
    off = []
    for trial in range(4):
        batch = torch.full((4, 64), 1.0 + world().rank + trial)
        model.zero_grad()
        backward(model, loss_of, batch)
        right = [p.grad.clone() for p in model.parameters() if p.requires_grad]
        model.zero_grad()
        Failing.fails = True
        with pytest.raises(ValueError, match="out of memory"):
            backward(model, loss_of, 100 * batch)
        Failing.fails = False
        backward(model, loss_of, batch)
        trained = [p for p in model.parameters() if p.requires_grad]
        off += [bool((p.grad != g).any()) for p, g in zip(trained, right, strict=True)]
    return off


def halved(_, bucket):
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / 4)


@pytest.mark.parametrize(
    ("options", "hook"),
    [
        ({"gradient_as_bucket_view": False}, False),
        ({"gradient_as_bucket_view": True}, False),
        ({"find_unused_parameters": True}, False),
        ({"static_graph": True}, False),
        (None, False),  # in PyTorch's own class
        ({}, True),
    ],
)
def test_the_gradient_after_a_backward_that_failed_on_every_rank_is_right(options, hook):
    found = run(gradients_after_an_error, options, hook, fresh=hook)
    assert not any(any(off) for off in found)


# --- what is trained is what was wrapped


class Around(nn.Module):
    """As LoRA is put around a layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.more = inner.requires_grad_(False), nn.Linear(4, 1)

    def forward(self, x):
        return self.inner(x) + self.more(x)


def exchange_head(net):
    net[1] = nn.Linear(4, 1)


def put_around(net):
    net[1] = Around(net[1])


def assign(net):
    net.load_state_dict({name: x.clone() for name, x in net.state_dict().items()}, assign=True)


def normalise_weights(net):
    torch.nn.utils.parametrizations.weight_norm(net[0])


CHANGES = {
    "a head is exchanged": (exchange_head, ADDED.format("1.weight")),
    "LoRA is put on": (put_around, ADDED.format("1.more.weight")),
    "weights are assigned": (assign, ADDED.format("0.weight")),
    "weights are parametrised": (
        normalise_weights,
        ADDED.format("0.parametrizations.weight.original0"),
    ),
    "a dtype of 16 bits": (lambda net: net.to(torch.bfloat16), CONVERTED.format("torch.bfloat16")),
}


def changed_and_trained(name, how, options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = wrap_model(net, "ddp", **options)
    batch = torch.randn(8, 4) + world().rank
    train(model, batch, how)
    CHANGES[name][0](net)
    batch = batch.to(next(net.parameters()).dtype)
    error = caught(train, model, batch, how)
    again = wrap_model(unwrap(model), "ddp")
    train(again, batch, how)
    check_in_sync(again)
    return str(error)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_changed_after_wrapping_raises_until_wrapped_again(name, how):
    for options in ({}, {"find_unused_parameters": True}):
        for error in run(changed_and_trained, name, how, options):
            assert CHANGES[name][1] in error
            assert "wrap again, model = wrap_model(unwrap(model))" in error


def kept(how):
    """Return whether what changes no parameter is taken."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    net[0].bias.requires_grad_(False)
    model = wrap_model(net, "ddp", find_unused_parameters=True)
    for change in (
        lambda: net.to(memory_format=torch.channels_last),
        lambda: net.load_state_dict(net.state_dict()),
        lambda: net[1].requires_grad_(False),
        lambda: net[1].requires_grad_(True),
        lambda: net[0].double().float(),  # a frozen part may do what it likes
    ):
        change()
        train(model, torch.randn(8, 4), how)
        check_in_sync(model)
    return True


@pytest.mark.parametrize("how", HOWS)
def test_what_keeps_the_parameters_is_taken(how):
    assert all(run(kept, how))


# --- gradients that differ show in the weights of the next step


class Reentrant(nn.Module):
    """A block that is used twice under reentrant checkpointing: DDP reduces after the second."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        x = self.base(x).requires_grad_()
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(x)


def checkpointed(reentrant, how):
    torch.manual_seed(0)
    net = Reentrant()
    net.reentrant = reentrant
    model = wrap_model(net, "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, errors = torch.randn(8, 4) + world().rank, []
    for _ in range(2):
        errors.append(str(caught(train, model, batch, how)))
        optimizer.step()
    torch.distributed.barrier()  # the group is usable
    return errors


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_that_differ_between_ranks_are_an_error_in_the_next_step(size, how):
    for first, second in run(checkpointed, True, how, world_size=size):
        assert first == "None"
        assert f"have the same in `{how}`, but `block.weight`, `block.bias` differ" in second
    assert run(checkpointed, False, how, world_size=size) == [["None", "None"]] * size

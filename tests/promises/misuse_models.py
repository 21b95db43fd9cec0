"""What the rows of ``errors.md`` use that concern the model."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pardata import Microbatches, all_reduce_sum, backward, load_weights, unwrap, world, wrap_model

X = torch.ones(1, 2)


def net(width=2):
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))


model = net()
optimizer = torch.optim.SGD(model.parameters())


def wrapped(strategy="ddp", **options):
    return wrap_model(net(), strategy, **options)


def with_new_head(strategy):
    model = wrapped(strategy)
    unwrap(model)[1] = nn.Linear(2, 1)
    return model


def in_bfloat16(strategy):
    model = wrapped(strategy)
    unwrap(model).bfloat16()
    return model


def reduced_in_loss_fn():
    backward(wrapped(), lambda model, x: loss(model, x) * all_reduce_sum(1), pieces())


def reduced_by_torch():
    def loss_fn(model, x):
        torch.distributed.all_reduce(torch.ones(1))
        return loss(model, x)

    here = world()
    own = [X] * (1 + (here.rank == 0))
    facts = {"first": here.rank + (here.rank > 0), "counts": [1] * (here.size + 1)}
    backward(wrapped(), loss_fn, Microbatches(own, epoch=0, step=0, **facts, size=here.size))


def tied():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    return model


def empty():
    with torch.device("meta"):
        return net()


def mesh():
    return init_device_mesh("cpu", (world().size,))


def frozen():
    return net().requires_grad_(False)


def renamed(is_other):
    first, last = net()
    return nn.ModuleDict({"first": first, "other" if is_other else "last": last})


def in_part(is_frozen):
    model = net()
    model[1].bias.requires_grad_(not is_frozen)
    return model


def buffered(has_more):
    model = net()
    if has_more:
        model.register_buffer("scale", torch.ones(2))
    return model


def filled(value):
    model = frozen()
    for parameter in model.parameters():
        parameter.fill_(value)
    return model


def loss(model, batch):
    return model(batch).square().mean()


def backward_by_hand(model):
    loss(model, X).backward()


def backward_or_reduce(is_backward):
    model = wrapped()
    if is_backward:
        backward(model, loss, X)
    else:
        all_reduce_sum(1)


def backward_under_no_sync():
    model = wrapped()
    with model.no_sync():
        backward(model, loss, X)


def saved(content):
    """Run `load_weights` on a file of these bytes, or of what `torch.save` makes of an object."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "weights.pt"
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            torch.save(content, file)
        load_weights(net(), file)


class Code:
    """Pickled, it is a call."""

    def __reduce__(self):
        return print, ("this must never be printed",)


def pieces(**changes):
    """A rank's two microbatches of a step."""
    here = world()
    facts = {"epoch": 0, "step": 0, "first": 2 * here.rank, "counts": [1] * 2 * here.size}
    return Microbatches([torch.ones(1, 2)] * 2, **{**facts, "size": here.size, **changes})


class Generates(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 1)

    def forward(self, x):
        return self.body(x)

    generate = forward


def hooked(strategy):
    model = wrapped(strategy)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(print)
    return model


def with_teacher():
    teacher = wrap_model(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)), "ddp")
    backward(wrapped(), lambda model, x: loss(model, x) + teacher(x).mean().detach(), X)


def generates():
    wrap_model(Generates(), "ddp").generate(X)


LABELS = {
    "one rank's model in float64": "wrap_model(net().double() if rank else net(), 'ddp')",
    "a model frozen on one rank": "wrap_model(frozen() if rank else net(), 'ddp')",
    "a layer more on one rank": "wrap_model(nn.Sequential(*net(), *net()[:rank]), 'ddp')",
    "a module of another name on one rank": "wrap_model(renamed(rank == 1), 'ddp')",
    "a parameter frozen on one rank": "wrap_model(in_part(rank == 1), 'ddp')",
    "a buffer more on one rank": "wrap_model(buffered(rank == 1), 'ddp')",
    "`wrapped.head = nn.Linear(1, 1)`": "setattr(wrapped(), 'head', nn.Linear(1, 1))",
    "a method that trains past the wrapper: `wrapped.generate(x)`": "generates()",
    '`loss.backward()` under `"exact"`': "backward_by_hand(wrapped('exact'))",
    "a wrapped teacher with batch norm in `loss_fn`": "with_teacher()",
    "`with model.no_sync(): backward(…)`": "backward_under_no_sync()",
    "`backward` on one rank, `all_reduce_sum` on the others": "backward_or_reduce(rank == 0)",
    "`all_reduce_sum` in `loss_fn`": "reduced_in_loss_fn()",
    "`torch.distributed.all_reduce` in `loss_fn`, uneven microbatches": "reduced_by_torch()",
    "weights changed on one rank": "check_in_sync(filled(rank))",
    "a file that runs code when it is unpickled": "saved(Code())",
    "a damaged file": "saved(b'PK' + bytes(100))",
    "a file that holds something else": "saved([1, 2])",
}

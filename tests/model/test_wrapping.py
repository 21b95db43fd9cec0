"""`wrap_model`: what every strategy returns, what is trained, and what is refused."""

import copy
import logging
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the usual name
from on_ranks import run, run_caught
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pardata import check_in_sync, fingerprint, init, unwrap, world, wrap_model
from pardata.ranks._process import process

FSDP_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
needs_fsdp = pytest.mark.skipif(
    not FSDP_ON_CPU, reason=f"fully_shard of torch {torch.__version__} needs a GPU"
)
SIZES = [1, 2, 3, 4]
WRAPPING = ["ddp", pytest.param("fsdp", marks=needs_fsdp)]


class Net(nn.Module):
    """Batch norm in the middle, as most image models."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, rows):
        return self.last(torch.relu(self.norm(self.first(rows))))


class Smooth(nn.Module):
    """No batch norm: the gradient of a batch is the mean of its samples' gradients."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, rows):
        return self.last(torch.tanh(self.first(rows)))


def seeded(kind=Net, seed=0):
    torch.manual_seed(seed)
    return kind()


def batch(rows=12, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 4, generator=numbers)
    return inputs, torch.randint(3, (rows,), generator=numbers)


def share(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


@pytest.fixture
def _says_again(monkeypatch):
    monkeypatch.setattr(process, "said", set())


# What comes back


@pytest.mark.parametrize("strategy", ["auto", "none"])
def test_a_single_process_gets_the_very_module_back(strategy):
    net = nn.Linear(2, 2)
    assert wrap_model(net, strategy) is net


def test_the_bare_module_is_moved():
    assert next(wrap_model(nn.Linear(2, 2), "none", device="meta").parameters()).is_meta


def kinds(strategy):
    net = seeded()
    wrapped = wrap_model(net, strategy)
    output = wrapped(batch(8)[0])
    output.sum().backward()
    return (
        isinstance(wrapped, DistributedDataParallel),
        type(wrapped).__mro__[1:].count(DistributedDataParallel),
        unwrap(wrapped) is net,
        tuple(output.shape),
        all(p.grad is not None for p in wrapped.parameters()),
    )


@pytest.mark.parametrize("size", SIZES)
def test_ddp_is_a_real_subclass_that_trains(size):
    assert run(kinds, "ddp", world_size=size) == [(True, 1, True, (8, 3), True)] * size


@pytest.mark.parametrize("size", [1, 2])
def test_auto_is_ddp_in_a_world_larger_than_one(size):
    wrapped = size > 1
    expected = (wrapped, int(wrapped), True, (8, 3), True)
    assert run(kinds, "auto", world_size=size) == [expected] * size


@needs_fsdp
@pytest.mark.parametrize("size", SIZES)
def test_fsdp_shards_the_module_in_place(size):
    assert run(kinds, "fsdp", world_size=size) == [(False, 0, True, (8, 3), True)] * size


@pytest.mark.usefixtures("_says_again")
def test_dp_on_a_cpu_runs_and_says_once_that_it_did_not_scatter(caplog):
    caplog.set_level(logging.INFO, "pardata")
    net = seeded(Smooth)
    rows, _ = batch()
    expected = net(rows)
    first, second = wrap_model(net, "dp"), wrap_model(seeded(), "dp", device_ids=[0, 1])
    assert isinstance(first, DataParallel)
    assert type(first) is not DataParallel
    assert torch.equal(first(rows), expected)
    if torch.cuda.is_available():
        pytest.skip("the log line depends on the number of GPUs")
    assert second(rows).shape == (12, 3)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "[0/1] strategy 'dp' did not scatter: it has 0 GPU(s), and splits a batch over two or more"
    ]


def test_a_scalar_loss_from_inside_stays_a_scalar_under_dp():
    class Loss(nn.Linear):
        def forward(self, rows):
            return super().forward(rows).mean()

    assert (
        wrap_model(Loss(2, 2), "dp", device="cpu", device_ids=[]).forward(torch.ones(3, 2)).ndim
        == 0
    )


def test_none_in_a_larger_world_warns_on_rank_0_that_ranks_train_apart():
    assert run(warned, world_size=2) == [
        ["[0/2] strategy 'none' in a world of 2: each rank trains a model of its own"],
        [],
    ]


def warned():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("pardata").addHandler(handler)
    wrap_model(seeded(), "none")
    wrap_model(seeded(), "none")
    return lines


def joined_alone():
    with init() as here:
        net = wrap_model(seeded(), "ddp")
        return here.size, isinstance(net, DistributedDataParallel)


def test_one_process_that_called_init_can_be_wrapped_too():
    assert run(joined_alone, world_size=1) == [(1, True)]


# What is trained


def start_and_steps(strategy, steps):
    wrapped = wrap_model(seeded(seed=dist.get_rank()), strategy)
    prints = [fingerprint(wrapped)]
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(steps):
        inputs, targets = batch(seed=step)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(share(inputs)), share(targets)).backward()
        optimizer.step()
        check_in_sync(wrapped)
        prints.append(fingerprint(wrapped))
    return prints


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("strategy", WRAPPING)
def test_ranks_seeded_differently_start_from_rank_0_and_stay_equal(strategy, size):
    told = run(start_and_steps, strategy, 3, world_size=size)
    assert told == [told[0]] * size
    assert told[0][0] == fingerprint(seeded(seed=0))
    assert len(set(told[0])) == 4  # each step changed the weights


def gradients(strategy):
    wrapped = wrap_model(seeded(Smooth), strategy)
    inputs, targets = batch()
    F.cross_entropy(wrapped(share(inputs)), share(targets)).backward()
    grads = [parameter.grad for parameter in unwrap(wrapped).parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", WRAPPING)
def test_the_gradient_is_that_of_the_global_batch(strategy, size):
    net = seeded(Smooth)
    inputs, targets = batch()
    F.cross_entropy(net(inputs), targets).backward()
    for told in run(gradients, strategy, world_size=size):
        for ours, parameter in zip(told, net.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-5, atol=1e-7)


def accumulated():
    wrapped = wrap_model(seeded(Smooth), "ddp")
    inputs, targets = (share(tensor) for tensor in batch())
    with wrapped.no_sync():
        (F.cross_entropy(wrapped(inputs[:3]), targets[:3]) / 2).backward()
    (F.cross_entropy(wrapped(inputs[3:]), targets[3:]) / 2).backward()
    return [parameter.grad for parameter in wrapped.parameters()]


def test_no_sync_accumulates_to_the_gradient_of_all():
    net = seeded(Smooth)
    inputs, targets = batch()
    F.cross_entropy(net(inputs), targets).backward()
    for told in run(accumulated, world_size=2):
        for ours, parameter in zip(told, net.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-5, atol=1e-7)


# Options


def options_seen():
    plain = wrap_model(seeded(), "ddp")
    told = wrap_model(
        seeded(),
        "ddp",
        find_unused_parameters=True,
        bucket_cap_mb=3,
        gradient_as_bucket_view=False,
        static_graph=True,
    )
    for _ in range(2):
        told(batch()[0]).sum().backward()
    return (
        (plain.find_unused_parameters, plain.gradient_as_bucket_view, plain.static_graph),
        (told.find_unused_parameters, told.gradient_as_bucket_view, told.static_graph),
        told.bucket_bytes_cap,
    )


def test_options_reach_ddp_and_gradients_are_views_of_its_buckets_by_default():
    expected = ((False, True, False), (True, False, True), 3 * 2**20)
    assert run(options_seen, world_size=2) == [expected] * 2


@pytest.mark.parametrize("strategy", ["none", "auto"])
def test_a_single_process_takes_the_options_of_ddp_and_ignores_them(strategy):
    net = nn.Linear(1, 1)
    assert wrap_model(net, strategy, find_unused_parameters=True, sync_batchnorm=True) is net


@pytest.mark.parametrize("strategy", ["none", "dp"])
def test_an_unknown_option_is_named_with_those_that_there_are(strategy):
    with pytest.raises(
        TypeError, match=f"ones of strategy '{strategy}', but 'bucket_cap' is not; there are .*dim"
    ):
        wrap_model(nn.Linear(1, 1), strategy, bucket_cap=1)


def unknown_option(strategy):
    wrap_model(seeded(), strategy, bucket_cap=1)


@pytest.mark.parametrize(("strategy", "known"), [("ddp", "bucket_cap_mb"), ("fsdp", "mp_policy")])
def test_an_unknown_option_raises_on_every_rank(strategy, known):
    for raised in run_caught(unknown_option, strategy, world_size=2):
        assert raised.type == "TypeError"
        assert f"ones of strategy '{strategy}', but 'bucket_cap' is not" in raised.text
        assert known in raised.text


def with_policy():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    wrapped = wrap_model(seeded(Smooth), "fsdp", mp_policy=policy, reshard_after_forward=False)
    return wrapped(batch()[0]).dtype


@needs_fsdp
def test_options_reach_fully_shard():
    assert run(with_policy, world_size=2) == [torch.bfloat16] * 2


@pytest.mark.skipif(FSDP_ON_CPU, reason="this torch shards on a CPU")
def test_fsdp_on_a_cpu_says_that_it_needs_a_newer_torch():
    for raised in run_caught(kinds, "fsdp", world_size=2):
        assert raised.type == "RuntimeError"
        assert "strategy 'fsdp' on a CPU needs a newer torch, but this is" in raised.text
        assert "install a newer one, or use 'ddp'" in raised.text


# What is refused


BAD_MODELS = {
    "class": lambda _: Net,
    "list": lambda _: [Net()],
    "frozen": lambda _: Net().requires_grad_(False),
    "no parameters": lambda _: nn.ReLU(),
    "lazy": lambda _: nn.Sequential(nn.LazyLinear(2)),
    "lazy buffers": lambda _: nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False)),
    "wrapped": lambda strategy: wrap_model(Net(), strategy),
    "holds wrapped": lambda strategy: nn.Sequential(wrap_model(Net(), strategy)),
}


def refused(what, strategy="ddp"):
    model = BAD_MODELS.get(what, lambda _: Net())(strategy)
    strategy = {"dp": "dp", "unknown strategy": "DDP"}.get(what, strategy)
    wrap_model(model, strategy, sync_batchnorm=what == "sync_batchnorm")


REFUSED = [
    ("class", "TypeError", "`model` must be a torch.nn.Module, but is the class Net"),
    ("list", "TypeError", "`model` must be a torch.nn.Module, but is a list"),
    ("frozen", "ValueError", "but Net has none that requires a gradient: use strategy='none'"),
    ("no parameters", "ValueError", "must have a parameter to train under strategy 'ddp'"),
    ("lazy", "ValueError", "but has lazy parameters: run one forward pass first"),
    ("lazy buffers", "ValueError", "but has lazy parameters: run one forward pass first"),
    ("wrapped", "ValueError", "but is or holds a wrapped module (ReadThroughDDP): pass unwrap("),
    ("holds wrapped", "ValueError", "holds a wrapped module (Sequential): pass unwrap(model), or"),
    ("dp", "ValueError", "'dp' must run in one process, without SyncBatchNorm, but has 2 proc"),
    (
        "unknown strategy",
        "ValueError",
        "must be one of 'auto', 'none', 'dp', 'ddp', 'fsdp', 'exact', but is 'DDP'",
    ),
]


@pytest.mark.parametrize(("what", "kind", "text"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_cannot_be_wrapped_is_refused_on_every_rank(what, kind, text):
    for raised in run_caught(refused, what, world_size=2):
        assert raised.type == kind
        assert text in raised.text


@needs_fsdp
def test_a_sharded_model_counts_as_wrapped():
    for raised in run_caught(refused, "wrapped", "fsdp", world_size=2):
        assert raised.type == "ValueError"
        assert "`model` must not be wrapped yet" in raised.text


ALONE = [
    ("class", "none", TypeError, "but is the class Net"),
    ("list", "none", TypeError, "but is a list"),
    ("wrapped", "dp", ValueError, "must not be wrapped yet, but is or holds a wrapped module"),
    ("holds wrapped", "dp", ValueError, "pass unwrap(model), or wrap once, at the outside"),
    ("unknown strategy", "none", ValueError, "'exact', but is 'DDP'"),
    ("lazy", "dp", ValueError, "run one forward pass first"),
    ("frozen", "dp", ValueError, "parameter to train under strategy 'dp'"),
    ("frozen", "ddp", ValueError, "parameter to train under strategy 'ddp'"),
    ("sync_batchnorm", "dp", ValueError, "without SyncBatchNorm, but has sync_batchnorm=True: use"),
    (
        "none of these",
        "ddp",
        RuntimeError,
        "strategy 'ddp' needs a process group, but this process",
    ),
    ("none of these", "fsdp", RuntimeError, "call `pardata.init()` first, or use strategy='auto'"),
]


@pytest.mark.parametrize(("what", "strategy", "kind", "text"), ALONE)
def test_what_cannot_be_wrapped_is_refused_in_a_single_process(what, strategy, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        refused(what, strategy)


@pytest.mark.parametrize(
    "model", [nn.ReLU(), nn.LazyLinear(2), nn.Linear(1, 1).requires_grad_(False)]
)
def test_none_takes_what_the_others_refuse(model):
    assert wrap_model(model, "none") is model


@pytest.mark.parametrize("strategy", ["auto", "none", "ddp", "fsdp", "dp"])
def test_a_launched_process_that_did_not_call_init_is_told(monkeypatch, strategy):
    told = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    told.update(MASTER_ADDR="localhost", MASTER_PORT="1")
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    text = "`wrap_model` needs the process group: torchrun started 2 processes, but"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        wrap_model(nn.Linear(1, 1), strategy)


# Ranks that differ


class Extra(Net):
    def __init__(self):
        super().__init__()
        self.more = nn.Linear(1, 1)


def renamed(net):
    net.final = net.last
    del net.last


CHANGES = {
    "name": renamed,
    "shape": lambda net: setattr(net, "last", nn.Linear(8, 5)),
    "dtype": lambda net: net.last.double(),
    "requires_grad": lambda net: net.norm.bias.requires_grad_(False),
    "buffer": lambda net: net.register_buffer("scale", torch.ones(2)),
}


def differing(what, strategy):
    rank = world().rank
    model, options = seeded(), {}
    if rank == 1:
        CHANGES.get(what, lambda _: None)(model)
        other = "fsdp" if strategy == "ddp" else "ddp"
        strategy = {"strategy": other, "unknown strategy": "dpp"}.get(what, strategy)
        options = {"option": {"find_unused_parameters": True}}.get(what, {})
    if (what, rank) in (("extra", 1), ("fewer", 0)):
        model = Extra()
    if (what, rank) == ("not a module", 1):
        model = None
    try:
        wrap_model(model, strategy, **options)
    except Exception as error:  # noqa: BLE001  # its type is looked at
        # The group works: here is a collective.
        number = torch.ones(1)
        dist.all_reduce(number)
        kinds(strategy="ddp")
        return type(error).__name__, str(error), number.item()
    return None


DIFFERING = [
    ("name", "rank 0: `last.weight` (3, 8) float32, trained\n", "`final.weight` (3, 8) float32"),
    ("shape", "rank 0: `last.weight` (3, 8) float32", "rank 1: `last.weight` (5, 8) float32"),
    ("dtype", "rank 0: `last.weight` (3, 8) float32", "rank 1: `last.weight` (3, 8) float64"),
    ("requires_grad", "`norm.bias` (8,) float32, trained\n", "rank 1: `norm.bias` (8,) float32\n"),
    ("extra", "rank 0: `norm.running_mean` (8,) float32\n", "rank 1: `more.weight` (1, 1) float32"),
    ("fewer", "rank 0: `more.weight` (1, 1) float32", "rank 1: `norm.running_mean` (8,) float32\n"),
    ("buffer", "rank 0: `norm.running_mean` (8,)", "rank 1: `scale` (2,) float32\n"),
    ("strategy", "rank 0: `the strategy` ddp\n", "rank 1: `the strategy` fsdp\n"),
    ("option", "rank 0: `the options` {'sync_b", "rank 1: `the options` {'find_unused_parameters"),
]


@pytest.mark.parametrize(("what", "here", "there"), DIFFERING, ids=[row[0] for row in DIFFERING])
def test_models_that_differ_raise_on_every_rank_and_leave_the_group_usable(what, here, there):
    size = 3 if what == "shape" else 2
    told = run(differing, what, "ddp", world_size=size)
    assert told == [told[0]] * size
    kind, text, total = told[0]
    assert (kind, total) == ("RuntimeError", size)
    assert "must pass the same model to `wrap_model`, but rank 1 differs from rank 0" in text
    assert here in text
    assert there in text
    assert text.endswith("Build the same model, in the same order, on every rank.")


@needs_fsdp
def test_models_that_differ_raise_under_fsdp_too():
    for kind, text, _ in run(differing, "shape", "fsdp", world_size=2):
        assert kind == "RuntimeError"
        assert "rank 1: `last.weight` (5, 8) float32" in text


def tail(extra_on):
    net = nn.Sequential(nn.Linear(1, 1))
    if world().rank == extra_on:
        net.append(nn.Linear(1, 1))
    wrap_model(net, "ddp")


@pytest.mark.parametrize("extra_on", [0, 1])
def test_a_rank_with_fewer_parameters_is_said_to_have_no_further_one(extra_on):
    for raised in run_caught(tail, extra_on, world_size=2):
        assert f"rank {extra_on}: `1.weight` (1, 1) float32, trained" in raised.text
        assert f"rank {1 - extra_on}: no further parameter or buffer" in raised.text


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("not a module", "TypeError", "`model` must be a torch.nn.Module, but is a NoneType"),
        ("unknown strategy", "ValueError", "'exact', but is 'dpp'"),
    ],
)
def test_a_bad_argument_on_one_rank_is_told_to_all(what, kind, text):
    told = run(differing, what, "ddp", world_size=3)
    assert [name for name, _, _ in told] == ["RuntimeError", kind, "RuntimeError"]
    assert all(text in message for _, message, _ in told)
    assert "rank 1 failed in `wrap_model`" in told[0][1]
    assert [total for _, _, total in told] == [3, 3, 3]


# Two wrapped models at once


def gan():
    rank = dist.get_rank()
    maker, judge = wrap_model(seeded(), "ddp"), wrap_model(nn.Linear(3, 1), "ddp")
    made = torch.optim.SGD(maker.parameters(), lr=0.1)
    judged = torch.optim.SGD(judge.parameters(), lr=0.1)
    real = torch.ones(4, 3) + rank
    for step in range(3):
        noise = batch(4, seed=10 * step + rank)[0]
        judged.zero_grad()
        (judge(maker(noise).detach()).mean() - judge(real).mean()).backward()
        judged.step()
        made.zero_grad()
        judge.requires_grad_(False)
        (-judge(maker(noise)).mean()).backward()
        judge.requires_grad_(True)
        made.step()
        check_in_sync(maker)
        check_in_sync(judge)
    return fingerprint(maker), fingerprint(judge)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_two_wrapped_models_train_against_each_other(size):
    assert len(set(run(gan, world_size=size))) == 1


def block_by_block():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    plain = copy.deepcopy(net)
    fully_shard(net[0])
    model = wrap_model(net, "fsdp")
    whole = torch.arange(8.0).view(4, 2)
    own = whole.chunk(world().size)[world().rank]
    model(own).mean().backward()
    plain(whole).mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return all(torch.allclose(ours.grad.full_tensor(), theirs.grad) for ours, theirs in pairs)


@needs_fsdp
@pytest.mark.parametrize("size", [1, 2])
def test_parts_may_be_sharded_before_the_whole(size):
    assert run(block_by_block, world_size=size) == [True] * size

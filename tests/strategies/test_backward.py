"""`backward`: the gradient of the mean over the global batch, however it is shared out."""

import copy
import itertools
import random
import warnings
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from common_gradients import (
    CLOSE,
    Net,
    cut,
    gradients,
    network,
    off,
    pieces,
    rows_of,
    squared_error,
    truth_of,
)
from logged import log_of
from on_ranks import caught, run, run_caught
from sharding import whole
from torch import nn
from torch.utils.checkpoint import checkpoint

from pardata import backward, check_in_sync, unwrap, world, wrap_model
from pardata.data._plan import local_range

SIZES = [1, 2, 3, 4]
TOKENS = 100  # of a sequence, masked ones included


def sequences(tokens):
    """Return a microbatch of one sequence for each number of tokens that are not masked."""
    inputs, targets = rows_of(TOKENS * len(tokens))
    return [
        (x[None], y[None], (torch.arange(TOKENS) < number)[None])
        for x, y, number in zip(inputs.split(TOKENS), targets.split(TOKENS), tokens, strict=True)
    ]


def masked_error(model, batch):
    inputs, targets, mask = batch
    errors = (model(inputs) - targets).square().mean(dim=-1)
    return (errors * mask).sum() / mask.sum()  # of no token: 0 / 0


def tokens_of(batch):
    return int(batch[2].sum())


# --- the gradient against that of one process and one batch ---


@dataclass(frozen=True)
class Case:
    """A global batch: the rows of its microbatches, or the tokens; plain: without microbatches."""

    sizes: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    plain: bool = False


CASES = {
    "even shares": Case((3,) * 12),
    "uneven shares": Case((3,) * 7),
    "a tail smaller than the world": Case((3,)),
    "microbatches of unequal size": Case((5, 1, 3, 8, 2, 1, 6)),
    "a batch smaller than the world": Case((1, 1)),
    "token counts that differ by 100 times": Case(tokens=(100, 1, 37, 2, 50)),
    "token counts, some of zero (loss NaN)": Case(tokens=(0, 100, 0, 1, 0, 3)),
    "tokens on the last rank alone": Case(tokens=(0, 0, 0, 7)),
    "no microbatches, uneven shares": Case((7,), plain=True),
    "no microbatches, ranks with no rows": Case((2,), plain=True),
}


def truth(case):
    """Return loss and gradients of one backward over the whole global batch."""
    if not case.tokens:
        return truth_of(*rows_of(sum(case.sizes)))
    net = network()
    loss = masked_error(
        net, [torch.cat(parts) for parts in zip(*sequences(case.tokens), strict=True)]
    )
    loss.backward()
    return loss.item(), gradients(net)


def batch_of(case):
    if case.plain:
        here = world()
        own = local_range(sum(case.sizes), here.rank, here.size)
        return tuple(tensor[own.start : own.stop] for tensor in rows_of(sum(case.sizes)))
    return cut(sequences(case.tokens) if case.tokens else pieces(case.sizes))


def errors_of_backward(*strategies):
    """Return, for each case, by how much the gradient is off, and the loss."""
    found = {}
    for strategy in strategies:
        model = wrap_model(network(), strategy)
        for name, case in CASES.items():
            model.zero_grad()
            wanted, gradient = truth(case)
            options = {"count": tokens_of} if case.tokens else {}
            loss_fn = masked_error if case.tokens else squared_error
            loss = backward(model, loss_fn, batch_of(case), **options)
            facts = (loss.dtype, loss.shape, loss.requires_grad, (loss / wanted - 1).abs().item())
            found[name, strategy] = off(gradients(model), gradient), facts, loss.item()
    return found


def check_matrix(ranks):
    for found in ranks:
        for name, (error, (*facts, loss_error), loss) in found.items():
            assert error < CLOSE, name
            assert loss_error < CLOSE, name
            assert facts == [torch.float64, (), False], name
            assert loss == ranks[0][name][2], name  # the same on every rank, to the bit


def errors_after_forwards_on_one_rank():
    """Look at a sample on rank 0 alone, with gradients, before some of the steps."""
    model, found = wrap_model(network(), "ddp"), []
    case = Case((3,) * (2 * world().size + 1))
    for step in range(6):
        if world().is_main and step != 2:
            squared_error(model, rows_of(3))
        model.zero_grad()
        backward(model, squared_error, batch_of(case))
        found.append(off(gradients(model), truth(case)[1]))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_a_forward_on_one_rank_alone_does_not_change_the_next_step(size):
    assert max(map(max, run(errors_after_forwards_on_one_rank, world_size=size))) < CLOSE


@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_is_that_of_the_mean_over_the_global_batch(size):
    check_matrix(run(errors_of_backward, "ddp", "fsdp", world_size=size))


def test_in_a_single_process_it_is_gradient_accumulation():
    check_matrix([errors_of_backward("none", "dp", "auto")])


# --- gradients that are there already ---


def added():
    here = world()
    found = {}
    first, second = (truth(CASES[name]) for name in ("uneven shares", "even shares"))
    ways = {
        "ddp, in buckets": ("ddp", {"gradient_as_bucket_view": True}),
        "ddp, apart": ("ddp", {"gradient_as_bucket_view": False}),
        "fsdp": ("fsdp", {}),
        **({"none": ("none", {})} if here.size == 1 else {}),
    }
    for name, (strategy, options) in ways.items():
        model = wrap_model(network(), strategy, **options)

        def step(case, model=model):
            backward(model, squared_error, batch_of(CASES[case]))

        for parameter in unwrap(model).parameters():
            parameter.grad = torch.full_like(parameter, 7.0)
        step("uneven shares")
        errors = [off([g - 7 for g in gradients(model)], first[1])]
        model.zero_grad()
        step("uneven shares")
        held = len({whole(p.grad).untyped_storage().data_ptr() for p in model.parameters()})
        step("even shares")
        both = [a + b for a, b in zip(first[1], second[1], strict=True)]
        errors.append(off(gradients(model), both))
        step("uneven shares")
        thrice = [a + b for a, b in zip(first[1], both, strict=True)]
        errors.append(off(gradients(model), thrice))
        model.zero_grad(set_to_none=False)
        step("uneven shares")
        errors.append(off(gradients(model), first[1]))
        if strategy != "fsdp":  # of each rank its own, which nobody reduces
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(here.rank))
            step("uneven shares")
            errors.append(off([g - here.rank for g in gradients(model)], first[1]))
        found[name] = held, errors
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_what_was_in_grad_is_counted_once_and_never_reduced_again(size):
    for found in run(added, world_size=size):
        for errors in (errors for _, errors in found.values()):
            assert max(errors) < CLOSE
        # The trap is there: gradients are parts of the memory that the next ones are reduced in.
        assert found["ddp, in buckets"][0] == 1
        assert found["ddp, apart"][0] == 4


# --- models and losses of many kinds ---


class Outputs(nn.Module):
    """Returns what `pack` makes of its result and of one that no loss uses."""

    def __init__(self, pack):
        super().__init__()
        self.body, self.pack = Net(), pack
        self.aside = nn.Linear(4, 2)

    def forward(self, rows):
        return self.pack(self.body(rows), self.aside(rows))


@dataclass
class Slotted:
    __slots__ = ("aside", "result")
    result: torch.Tensor
    aside: torch.Tensor


class LossInside(nn.Module):
    """As language models do: returns its loss, which is NaN where no token counts."""

    def __init__(self):
        super().__init__()
        self.body = Net()

    def forward(self, batch):
        loss = masked_error(self.body, batch)
        return {"loss": loss, "logits": None}


class NaNInside(Net):
    """An attention in which nothing is left to attend to makes NaN out of anything."""

    def forward(self, batch):
        inputs, _, mask = batch
        return super().forward(inputs) / mask.any() + 0 / mask.any()


class Checkpointed(Net):
    def forward(self, rows):
        def part(rows):
            return torch.tanh(self.first(F.dropout(rows, 0.0)))

        return self.last(checkpoint(part, rows.clone().requires_grad_(), use_reentrant=True))


def several_forwards(model, batch):
    inputs, targets = batch
    with torch.no_grad():
        model(inputs)
    return F.mse_loss(model(inputs) + model(inputs.flip(0)), targets)


def one_element(model, batch):
    return squared_error(model, batch).reshape(1, 1)


def in_place(model, batch):
    return F.mse_loss(model(batch[0]).mul_(2), batch[1])


def constant_where_nothing_counts(model, batch):
    outputs = model(batch[0])
    return masked_error(lambda _: outputs, batch) if tokens_of(batch) else torch.zeros(())


def of_output(get):
    return lambda model, batch: F.mse_loss(get(model(batch[0])), batch[1])


def inside(model, batch):
    return model(batch)["loss"]


def nan_inside(model, batch):
    return masked_error(lambda _: model(batch), batch)


MODELS = {
    "dict": (lambda: Outputs(lambda a, b: {"r": [a], "b": b}), of_output(lambda o: o["r"][0])),
    # DDP finds no unused ones in this.
    "slots": (lambda: Outputs(Slotted), of_output(lambda o: o.result + o.aside.sum())),
    "several forwards": (Net, several_forwards),
    "one element": (Net, one_element),
    "in place": (Net, in_place),
    "loss inside": (LossInside, inside),
    "NaN inside": (NaNInside, nan_inside),
    "constant": (Net, constant_where_nothing_counts),
    "reentrant checkpoint": (Checkpointed, squared_error),
}
OF_TOKENS = ("loss inside", "NaN inside", "constant")
PARTS = [(3,), (3, 2, 4), (2, 1, 1, 1, 5)]


def mean_over(net, loss_fn, parts, count):
    """Return the gradients of the mean, as one process without pardata gets them."""
    total = sum(count(part) for part in parts)
    for part in parts:
        if count(part):
            (loss_fn(net, part).reshape(()) * (count(part) / total)).backward()
    return gradients(net)


def errors_of_models(strategy):
    found = {}
    for name, (kind, loss_fn) in MODELS.items():
        if name == "slots" and strategy == "fsdp" and torch.__version__ < (2, 12):
            continue  # refused
        net = network(kind)
        unused = name == "dict"
        options = {"find_unused_parameters": True} if unused and strategy == "ddp" else {}
        model = wrap_model(copy.deepcopy(net), strategy, **options)
        for sizes in PARTS:
            net.zero_grad()
            model.zero_grad()
            if name in OF_TOKENS:
                parts, count = sequences([0, *sizes, 0]), tokens_of
            else:
                parts, count = pieces(sizes), None
            wanted = mean_over(net, loss_fn, parts, count or (lambda part: len(part[0])))
            backward(model, loss_fn, cut(parts), count=count)
            ours = gradients(model)
            if unused:  # what no loss uses has no gradient, stand-in or not
                assert ours[-2:] == [None, None], name
            found[name, sizes] = off(ours, wanted)
    return found


@pytest.mark.parametrize(
    ("strategy", "size"), [("none", 1), ("dp", 1), *itertools.product(["ddp", "fsdp"], [1, 2])]
)
def test_models_and_losses_may_be_of_many_kinds(strategy, size):
    for found in run(errors_of_models, strategy, world_size=size):
        assert {name: error for name, error in found.items() if error >= CLOSE} == {}


class Branches(nn.Module):
    """Uses `rare` for microbatches of two rows alone, and `never` for none."""

    def __init__(self):
        super().__init__()
        self.body, self.rare, self.never = Net(), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, rows):
        return self.body(rows) + (self.rare(rows) if len(rows) == 2 else 0)


def unused(strategy, sizes_of_steps):
    options = {"find_unused_parameters": True} if strategy == "ddp" else {}
    model = wrap_model(network(Branches), strategy, **options)
    net = network(Branches)
    kept = torch.full((3, 4), 5.0, dtype=torch.float64)
    errors = []
    for sizes in sizes_of_steps:
        model.zero_grad()
        net.zero_grad()
        never = unwrap(model).never
        never.weight.grad = torch.full_like(never.weight, 5.0)
        net.never.weight.grad = kept.clone()
        wanted = mean_over(net, squared_error, pieces(sizes), lambda part: len(part[0]))
        backward(model, squared_error, cut(pieces(sizes)))
        ours = gradients(model)
        assert ours[-1] is None
        assert torch.equal(ours[-2], kept)
        errors.append(off(ours, wanted))
    return errors


RARELY = {
    # `rare` is used first, last, in the middle, on one rank only, and not at all.
    "ddp": [(2, 3, 3, 3), (3, 3, 3, 2), (3, 2, 3), (3, 3), (3,), (2,), (2, 2, 2, 2)],
    "fsdp": [(3,) * 7, (3,)],
}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_parameter_that_no_microbatch_uses_keeps_its_gradient_on_every_rank(strategy, size):
    for errors in run(unused, strategy, RARELY[strategy], world_size=size):
        assert max(errors) < CLOSE


# --- what is returned ---


def returned():
    found = {}
    for strategy in ["ddp", "fsdp"]:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            model = wrap_model(network().to(dtype), strategy)
            parts = [(x.to(dtype), y.to(dtype)) for x, y in pieces((3, 3, 1))]
            loss = backward(model, squared_error, cut(parts))
            grads = {parameter.grad.dtype for parameter in model.parameters()}
            found[strategy, str(dtype)] = loss.dtype, loss.ndim, loss.requires_grad, loss.item()
            assert grads == {dtype}
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_the_loss_is_detached_at_least_float32_and_the_same_everywhere(size):
    ranks = run(returned, world_size=size)
    wanted = truth(Case((3, 3, 1)))[0]
    for (_, kind), (dtype, ndim, requires_grad, value) in ranks[0].items():
        assert dtype == (torch.float64 if "float64" in kind else torch.float32)
        assert (ndim, requires_grad) == (0, False)
        assert value == pytest.approx(wanted, rel=1e-12 if "float64" in kind else 0.02)
    assert ranks == [ranks[0]] * size


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, dtype=torch.complex64))

    def forward(self, rows):
        return (rows.to(torch.complex64) @ self.weight).abs()


def test_the_loss_of_a_complex_model_is_real():
    net = Complex()
    loss = backward(net, lambda model, batch: model(batch[0]).mean(), pieces((3,))[0])
    assert loss.dtype == torch.float32
    assert net.weight.grad is not None
    rows = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    assert backward(nn.ReLU(), lambda model, x: model(x).mean(), rows) == 1  # without parameters


# --- buffers and generators ---


def normed():
    torch.manual_seed(0)
    parts = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)]
    return nn.Sequential(*parts).double()


def buffers(model):
    return {name: buffer.clone() for name, buffer in unwrap(model).named_buffers()}


def after_steps(strategy, steps, count):
    model = wrap_model(normed(), strategy)
    told = []
    for parts in steps:
        before = torch.get_rng_state()
        backward(model, lambda m, b: squared_error(m, b[:2]), cut(parts), count=count)
        told.append((buffers(model), torch.equal(torch.get_rng_state(), before)))
    check_in_sync(model)
    model.eval()
    with torch.no_grad():
        scores = model(rows_of(5, seed=3)[0])
    return told, scores


def replay(parts, ranks, steps_before):
    """Return the buffers that each rank has after running its microbatches that count."""
    found = []
    for rank in range(ranks):
        net = normed()
        net.load_state_dict(steps_before, strict=False)
        for number in local_range(len(parts), rank, ranks):
            if parts[number][2]:
                net(parts[number][0])
        found.append(buffers(net))
    return found


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_buffers_are_equal_on_all_ranks_and_ignore_uncounted_microbatches(strategy, size):
    steps = [
        [(x, y, n) for (x, y), n in zip(pieces((4,) * len(counts), seed), counts, strict=True)]
        for seed, counts in enumerate([(4, 4, 4, 4), (4,), (1, 0, 9, 0, 0), (3, 1, 0)])
    ]
    ranks = run(after_steps, strategy, steps, third, world_size=size)
    expected = {}
    for step, parts in enumerate(steps):
        held = replay(parts, size, expected)
        weights = [sum(parts[i][2] for i in local_range(len(parts), r, size)) for r in range(size)]
        if strategy == "ddp":
            expected = held[0]
        else:
            expected = {
                name: sum(w * b[name] for w, b in zip(weights, held, strict=True)) / sum(weights)
                if held[0][name].is_floating_point()
                else held[0][name]
                for name in held[0]
            }
        for told, _ in ranks:
            found, is_where_it_was = told[step]
            for name, buffer in found.items():
                torch.testing.assert_close(buffer, expected[name], rtol=1e-12, atol=1e-14)
            assert is_where_it_was
    for _, scores in ranks:
        assert torch.equal(scores, ranks[0][1])


def third(part):
    return part[2]


class Drawing(Net):
    """Draws from every generator, in the forward and, being checkpointed, in the backward."""

    def forward(self, rows):
        def part(rows):
            random.random()
            return torch.tanh(self.first(F.dropout(rows, 0.1)))

        return self.last(checkpoint(part, rows, use_reentrant=False, preserve_rng_state=False))


def drawn(strategy):
    model = wrap_model(network(Drawing), strategy)
    states = random.getstate(), torch.get_rng_state()
    backward(model, lambda m, b: m(b[0]).mean(), cut(pieces((3,))))
    return states[0] == random.getstate(), torch.equal(states[1], torch.get_rng_state())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_placeholder_moves_no_generator_even_in_its_backward(strategy):
    first, second = run(drawn, strategy, world_size=2)
    assert first == (False, True)  # PyTorch's is put back for whatever was run
    assert second == (True, True)


# --- compiled ---


def compiled(strategies):
    warnings.simplefilter("ignore")  # dynamo's own deprecations
    errors = {}
    options = {"backend": "eager", "dynamic": False}
    for strategy in strategies:
        for where in ("inside", "outside", "in place"):
            net = network()
            if where == "in place":
                net.compile(**options)
            model = wrap_model(
                torch.compile(net, **options) if where == "inside" else net, strategy
            )
            model = torch.compile(model, **options) if where == "outside" else model
            for sizes in ((3, 3, 3), (3,)):
                model.zero_grad()
                backward(model, squared_error, cut(pieces(sizes)))
                errors[strategy, where, sizes] = off(gradients(model), truth(Case(sizes))[1])
    stats = dict(torch._dynamo.utils.counters["recompile_limit"])
    return errors, stats


@pytest.mark.parametrize("size", [1, 2])
def test_the_model_may_be_compiled_inside_outside_and_in_place(size):
    strategies = ["none"] if size == 1 else ["ddp", "fsdp"]
    for errors, limits in run(compiled, strategies, world_size=size, timeout=300):
        assert max(errors.values()) < CLOSE
        assert not limits


def buffers_after_a_step(strategy, where, sizes):
    warnings.simplefilter("ignore")
    model = wrap_model(normed(), strategy)
    model = torch.compile(model, backend="eager") if where == "outside" else model
    backward(model, squared_error, cut(pieces(sizes)))
    check_in_sync(model)
    return [buffer.tolist() for buffer in model.buffers()]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("sizes", [(4, 4), (4,)])
def test_buffers_are_made_equal_under_compile_too(strategy, sizes):
    (plain, again), (compiled, others) = (
        run(buffers_after_a_step, strategy, where, sizes, world_size=2)
        for where in ("plain", "outside")
    )
    assert plain == again
    assert compiled == others == plain


# --- what is refused: see tests/promises/misuse_models.py too ---


def alone_in_two():
    net, parts = network(), pieces((3, 1))
    with log_of() as log:
        for _ in range(2):
            net.zero_grad()
            loss = backward(net, squared_error, cut(parts))
    wanted, gradient = truth_of(*parts[world().rank])
    return log.lines, (off(gradients(net), gradient), abs(loss.item() - wanted))


def test_a_bare_model_trains_alone_and_warns_once():
    for rank, (lines, same) in enumerate(run(alone_in_two, world_size=2)):
        text = "no strategy keeps the replicas of Net equal: each of 2 ranks trains its own"
        assert lines == [f"[0/2] {text}; pass what wrap_model returned"] * (rank == 0)
        assert max(same) < CLOSE


def sharded_over_a_part():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    net = fully_shard(network(), mesh=mesh["inner"])
    backward(net, squared_error, cut(pieces((3, 3))))


class FullyShardedDataParallel(nn.Module):
    """As FSDP's older wrapper is known: by its name. It needs a GPU."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def older_wrapper():
    backward(FullyShardedDataParallel(network()), squared_error, cut(pieces((3, 3))))


def unused_by_a_rank():
    # Only rank 0 reduces all: before, the next collective met its buckets, and gloo aborted.
    model = wrap_model(network(Branches), "ddp")
    backward(model, squared_error, cut(pieces((2, 3))))


def static(sizes_of_steps):
    model = wrap_model(network(), "ddp", static_graph=True)
    errors = []
    for sizes in sizes_of_steps:
        model.zero_grad()
        backward(model, squared_error, cut(pieces(sizes)))
        errors.append(off(gradients(model), truth(Case(sizes))[1]))
    return errors


def test_a_static_graph_may_have_placeholders():
    for errors in run(static, [(3,), (3, 2), (1,), (5, 4)], world_size=2):
        assert max(errors) < CLOSE


def accumulated_statically():
    static([(3,) * 3])


NOT_ALL = "every parameter must take part in the loss, but "
NOT_TOGETHER = [
    (sharded_over_a_part, ["ValueError", "fully_shard must get a mesh of all 2 ranks, but got 1"]),
    (older_wrapper, ["RuntimeError", "each trained parameter must be sharded under 'fsdp', but"]),
    (unused_by_a_rank, ["RuntimeError", NOT_ALL, "did not", "find_unused_parameters=True"]),
    (accumulated_statically, ["ValueError: `static_graph` must be False for 2 microbatches on a"]),
]  # fmt: skip


@pytest.mark.parametrize(("step", "texts"), NOT_TOGETHER)
def test_steps_that_ranks_cannot_train_together_raise_on_each(step, texts):
    ranks = run_caught(step, world_size=2)
    for raised in ranks:
        assert all(text in str(raised) for text in texts), raised
    if step is unused_by_a_rank:
        assert "`never.weight`" in ranks[0].text
        assert "`rare.weight`" in ranks[1].text


# Forwards in one step


def _as_often_as_the_rank():
    model = wrap_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "ddp")
    rows = torch.arange(8.0).view(4, 2) + world().rank

    def loss_fn(model, x):
        return sum(model(x).square().mean() for _ in range(1 + world().rank))

    backward(model, loss_fn, rows)
    check_in_sync(model)


def test_ranks_may_run_the_model_unequally_often_in_a_step():
    run(_as_often_as_the_rank, world_size=2, timeout=20)


# Memory


def _outputs_in_the_backward(strategy, terms):
    """Return, for each step, whether what the model has returned still lives in the backward."""
    model, alive = wrap_model(network(), strategy), []

    def loss_fn(model, batch):
        outputs = model(batch[0])
        output = weakref.ref(outputs)
        loss = F.cross_entropy(outputs, batch[1].argmax(1))  # its backward does not need them
        loss.register_hook(lambda _: alive.append(output() is not None))
        return {"it": loss} if terms else loss

    count = (lambda batch: {"it": len(batch[0])}) if terms else None
    for _ in range(3):
        backward(model, loss_fn, pieces((3,))[0], count=count)
    return alive


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize(("strategy", "size"), [("none", 1), ("ddp", 2), ("fsdp", 2)])
def test_what_the_model_returns_does_not_live_through_the_backward(strategy, size, terms):
    assert run(_outputs_in_the_backward, strategy, terms, world_size=size) == [[False] * 3] * size


@pytest.mark.parametrize("size", [1, 2])
def test_autocast_around_backward_is_an_error(size):
    assert run(under_autocast, world_size=size) == [("", "", [])] * size


def under_autocast():
    """Return what is wrong: of an error around, of one without the cache, of a loss inside."""
    model, batch = wrap_model(nn.Linear(4, 1)), torch.ones(2, 4)

    def half(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).square().mean()

    whole = lambda model, batch: model(batch).square().mean()  # noqa: E731  # short
    with torch.autocast("cpu", torch.bfloat16):
        error = str(caught(backward, model, whole, batch))
    missing = "" if "`backward` must run outside of autocast" in error else error
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        uncached = caught(backward, model, whole, batch)
    others = "" if isinstance(uncached, torch.Tensor) else str(uncached)
    return missing, others, [] if backward(model, half, batch).ndim == 0 else ["inside"]


# --- losses of 16 bits ---


def weighed(strategy, dtype):
    """Return gradients of ones of which the ranks, or microbatches, have 1, 3 and 5."""
    found, sizes = [], (1, 3, 5) if world().size != 2 else (5, 1)
    for is_plain in (False, True) if strategy in ("ddp", "fsdp") else (False,):
        model = wrap_model(nn.Linear(1, 1, bias=False).to(dtype), strategy)
        parts = [torch.ones(size, 1, dtype=dtype) for size in sizes]
        batch = parts[world().rank % len(parts)] if is_plain else cut([(x,) for x in parts])
        backward(model, lambda m, b, p=is_plain: m(b if p else b[0]).mean(), batch)
        (gradient,) = gradients(model)
        found.append(gradient.item())
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp", "exact"])
def test_a_loss_of_16_bits_is_not_weighed_in_16_bits(strategy, dtype):
    sizes = (1,) if strategy == "none" else (1, 2) if strategy == "fsdp" else (1, 2, 3)
    for size in sizes:  # with 3 ranks FSDP's own sum rounds
        for found in run(weighed, strategy, dtype, world_size=size):
            assert found == [1.0] * len(found)

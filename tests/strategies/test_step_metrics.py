"""Loss, counts and metrics of a step are those of all ranks."""

import copy
import math
import pickle
from collections import Counter
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the usual name
from common_gradients import (
    CLOSE,
    cut,
    gradients,
    network,
    off,
    pieces,
    rows_of,
    squared_error,
    truth_of,
)
from on_ranks import caught, run, run_caught
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from pardata import Mean, backward, check_in_sync, make_loader, unwrap, world, wrap_model
from pardata.data._plan import local_range
from pardata.strategies import _ddp_reducer
from pardata.strategies._step_metrics import StepMetrics

TOLD = 26  # numbers that each rank tells in a step: a count, hashes, loss and metrics
STRATEGIES = ["ddp", "fsdp", "exact"]


# --- metrics ---


def with_metrics(model, batch):
    inputs, targets = batch
    output = model(inputs)
    metrics = {
        "rows": len(inputs),
        "parts": [inputs.mean(), (inputs.mean(dim=0).float(), inputs[0, 0] > 9)],
        "many": inputs.mean() * torch.arange(100.0),
        "counted": Counter(rows=len(inputs)),
    }
    return F.mse_loss(output, targets), metrics


SIZES_OF_STEPS = [(3,) * 7, (3, 1, 5), (4,), (2, 2)]


def metrics_of(strategy):
    model = wrap_model(network(), strategy)
    found = []
    for sizes in SIZES_OF_STEPS:
        model.zero_grad()
        loss, metrics = backward(model, with_metrics, cut(pieces(sizes)))
        inputs, targets = rows_of(sum(sizes))
        wanted, gradient = truth_of(inputs, targets)
        assert off(gradients(model), gradient) < CLOSE
        assert loss.item() == pytest.approx(wanted, rel=CLOSE)
        assert list(metrics) == ["rows", "parts", "many", "counted"]
        assert metrics["counted"] == {"rows": metrics["rows"]}
        assert metrics["rows"] == pytest.approx(sum(n * n for n in sizes) / sum(sizes))
        mean, (columns, flag) = metrics["parts"]
        torch.testing.assert_close(mean, inputs.mean(), rtol=CLOSE, atol=1e-14)
        torch.testing.assert_close(columns, inputs.mean(dim=0).float())
        assert (flag.dtype, flag.item()) == (torch.float32, 0.0)
        torch.testing.assert_close(metrics["many"], inputs.mean().float() * torch.arange(100.0))
        assert {mean.requires_grad, columns.requires_grad} == {False}
        found.append(repr([metrics["rows"], mean.item(), columns.tolist()]))
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_metrics_are_means_over_the_global_batch_without_the_placeholders(strategy):
    at_sizes = {size: run(metrics_of, strategy, world_size=size) for size in (1, 2, 3)}
    for ranks in at_sizes.values():
        assert ranks == [ranks[0]] * len(ranks)
    if strategy == "exact":
        assert at_sizes[1][0] == at_sizes[2][0] == at_sizes[3][0]


def test_metrics_of_a_single_process_are_theirs():
    assert metrics_of("none") == metrics_of("dp")
    net, (inputs, targets) = network(), rows_of(3)
    for _ in range(2):  # the first step, in which the model is looked at, and another
        loss, metrics = backward(net, with_metrics, (inputs, targets))
        assert loss.item() == pytest.approx(truth_of(inputs, targets)[0])
        assert metrics["rows"] == 3.0
        assert isinstance(metrics["rows"], float)


def test_a_part_of_the_loss_may_be_a_metric_with_its_gradient():
    def loss_fn(model, batch):
        loss = squared_error(model, batch)
        return loss, [loss]

    loss, (part,) = backward(network(), loss_fn, cut(pieces((2, 1))))  # warnings are errors here
    assert part.item() == pytest.approx(loss.item())
    assert not part.requires_grad


NUMBERS = [1700000123, 2**24 + 1, 0.1, 1e39, -5.5e200, 3e-320, -0.0, math.inf, True, 10**30]


def means_of_numbers(small):
    """Return the means of numbers that are the same everywhere, and of those of each rank."""
    with patch.object(_ddp_reducer, "SMALL", _ddp_reducer.SMALL if small else 0):
        model = wrap_model(nn.Linear(4, 3))  # whose gradients are of float32
    here = world()

    def loss_fn(model, batch):
        wide = torch.tensor([number * 1.0 for number in NUMBERS], dtype=torch.float64)
        own = (here.rank + 1) * 1e39
        return squared_error(model, batch), [NUMBERS, wide, torch.tensor(2**40 + 1), own]

    rows = tuple(tensor.float() for tensor in rows_of(3))
    _, metrics = backward(model, loss_fn, rows)
    _, (_, seen, *_) = backward(model, loss_fn, rows, count=lambda _: 2**30 + here.rank)
    return metrics, seen, [number for _, number in [backward(model, nan_on_one, rows)]]


def nan_on_one(model, batch):
    return squared_error(model, batch), math.nan if world().rank else 1.0


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_metrics_have_the_digits_and_the_range_of_float64(size, small):
    for (numbers, wide, whole, own), seen, (nan,) in run(means_of_numbers, small, world_size=size):
        assert numbers == pytest.approx([float(number) for number in NUMBERS], rel=1e-15, abs=0)
        assert wide.tolist() == pytest.approx(numbers, rel=1e-15, abs=0)
        assert seen.tolist() == pytest.approx(numbers, rel=1e-15, abs=1e-300)
        assert own == pytest.approx((size + 1) / 2 * 1e39, rel=1e-15)
        assert whole.dtype == torch.float32
        assert math.isnan(nan) == (size > 1)


def large_counts():
    """Return the mean of counts that float32 does not tell from each other."""
    model = wrap_model(nn.Linear(1, 1), "ddp")
    count = 2**24 + 2 * world().rank + 1
    rows = torch.full((1, 1), float(world().rank))

    def loss_fn(model, rows):
        return model(rows).mean(), float(count)

    return backward(model, loss_fn, rows, count=lambda _: count)[1]


def test_a_count_may_be_larger_than_the_whole_numbers_of_float32():
    counts = [2**24 + 1, 2**24 + 3]
    mean = sum(count * count for count in counts) / sum(counts)
    assert run(large_counts, world_size=2) == [pytest.approx(mean, rel=1e-15)] * 2


def nothing_counts_of(strategy):
    """Of a microbatch that counts 0 neither loss nor metrics are looked at, be they NaN."""
    model = wrap_model(network(), strategy)

    def loss_fn(model, batch):
        loss = squared_error(model, batch) * (math.nan if len(batch[0]) == 2 else 1)
        return loss, [loss.detach()]

    step = cut(pieces((2, 3, 2)))
    loss, (metric,) = backward(model, loss_fn, step, count=lambda b: 0 if len(b[0]) == 2 else 3)
    return loss.isfinite().item(), loss.item() == metric.item()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_metrics_of_what_counts_nothing_do_not_count(strategy):
    assert run(nothing_counts_of, strategy, world_size=2) == [(True, True)] * 2


def unlike(model, batch):
    return squared_error(model, batch), torch.ones(4 + len(batch[0]))


def all_unlike(strategy):
    model = wrap_model(network(), strategy)
    backward(model, squared_error, cut(pieces((3, 3))))
    raised = caught(backward, model, unlike, cut(pieces((3, 1, 3, 1))))
    model.zero_grad()
    backward(model, squared_error, cut(pieces((3, 3))))
    return str(raised), off(gradients(model), truth_of(*rows_of(6))[1])


@pytest.mark.parametrize("strategy", ["ddp", "exact"])
def test_metrics_that_differ_between_microbatches_raise_on_every_rank(strategy):
    # Between ranks: tests/promises/misuse_models.py.
    for raised, error in run(all_unlike, strategy, world_size=2):
        assert "of the same structure for each microbatch" in raised
        assert error < CLOSE


def in_8_bits(model, batch):
    return squared_error(model, batch), torch.full((2,), 1.5).to(torch.float8_e4m3fn)


def test_a_metric_in_8_bits_is_a_mean_over_microbatches():
    _, mean = backward(network(), in_8_bits, cut(pieces((5, 2, 6))))
    assert (mean.dtype, mean.float().tolist()) == (torch.float8_e4m3fn, [1.5, 1.5])


# --- a metric is a mean ---


def of_kind(kind):
    def loss_fn(model, batch):
        inputs, targets = batch
        outputs = model(inputs)
        loss = F.mse_loss(outputs, targets)
        metrics = {
            "outputs": outputs,
            "detached, in a list": [outputs.detach()],
            "losses": (outputs - targets).square().mean(1),
            "a row for each column": outputs.detach().mean(0),
            "one number": loss.detach().view(1),
            "a number": 2.5,
        }
        return loss, {"it": metrics[kind]}

    return loss_fn


ROWS = {
    "outputs": "`metrics['it']`",
    "detached, in a list": "`metrics['it'][0]`",
    "losses": "`metrics['it']`",
}
MEANS = ["a row for each column", "one number", "a number"]


def refused_and_taken(strategy, plain):
    """Return what each kind of metrics ends in; gradients are as if those refused had not been."""
    found, model = {}, wrap_model(network(), strategy)
    rows = pieces((6,))[0] if plain else cut(pieces((5, 2, 6)))
    for kind in (*ROWS, *MEANS):
        gradient = gradients(model)
        found[kind] = caught(backward, model, of_kind(kind), rows)
        if kind in ROWS:
            assert gradients(model) == gradient
    return found


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_metric_with_rows_per_sample_raises_on_every_rank(strategy, size, plain):
    if strategy == "exact" and plain:
        pytest.skip("takes microbatches alone")
    for found in run(refused_and_taken, strategy, plain, world_size=size):
        for kind, name in ROWS.items():
            assert found[kind].type == "TypeError"
            assert f"{name} must be a mean over the microbatch" in found[kind].text
            assert "all_gather" in found[kind].text
        assert not any(hasattr(found[kind], "text") for kind in MEANS)


def outputs_as_metrics(strategy):
    """Return what a large output ends in, as a metric and as the total of a `Mean`."""
    model, batch = wrap_model(network(), strategy), cut(pieces((5, 2, 6)))

    def returns(value):
        return lambda model, batch: (squared_error(model, batch), value)

    values = torch.ones(70, 150), Mean(torch.ones(70, 150), 2)
    return [caught(backward, model, returns(value), batch) for value in values]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_metric_of_very_many_elements_raises_on_every_rank(strategy):
    for size in (1, 2):
        for refused, (_, mean) in run(outputs_as_metrics, strategy, world_size=size):
            assert str(refused) == (
                "TypeError: `metrics` must be a mean over the microbatch, of at most 10000 "
                "elements, but its shape is (70, 150): return its mean, or keep it and call "
                "all_gather after backward; if rows are classes, return Mean(total, count)"
            )
            assert mean.shape == (70, 150)


def grown(strategy):
    """Return by how much a model grows in twenty steps whose metrics have other shapes."""
    model, sizes = wrap_model(nn.Linear(4, 3), strategy), []
    for number in range(20, 60):
        values = torch.ones(number)
        backward(model, lambda m, x, v=values: (m(x).square().mean(), v), torch.ones(2, 4))
        sizes.append(len(pickle.dumps(model)))
    return sizes[-1] - sizes[19]


def test_metrics_of_ever_other_shapes_take_no_more_memory():
    assert max(grown("none"), *run(grown, "ddp", world_size=2)) < 100


def of_every_class(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets), targets.mean(0)


def test_a_known_metric_may_have_as_many_values_as_samples():
    """As the accuracies of 10 classes in the last batch of an epoch, of 10 samples."""
    net = network()
    classes = pieces((1,))[0][1].shape[1]
    for rows in (classes + 1, classes):
        _, means = backward(net, of_every_class, pieces((rows,))[0])
        assert means.shape == (classes,)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU, where nobody reads what others tell."""

    is_cpu = property(lambda _: False)


def numbers_on_a_gpu(*of_ranks):
    """Return what each step ends in, of which the metrics are so many numbers."""
    model, sums, found = wrap_model(nn.Linear(4, 3).double()), StepMetrics._sums, []
    here = patch.object(StepMetrics, "_sums", lambda *given: sums(*given).as_subclass(OnGpu))
    with here:
        for number in of_ranks[world().rank]:
            values = torch.arange(float(number))
            found.append(caught(step_with, model, values))
    return found


def step_with(model, values):
    def loss_fn(model, batch):
        return squared_error(model, batch), values

    _, means = backward(model, loss_fn, rows_of(3, seed=world().rank))
    return torch.equal(means, values)


def test_many_gpu_metrics_are_compared_before_they_are_sent():
    assert run(numbers_on_a_gpu, [4, 4, 30, 30, 4], [4, 4, 30, 30, 4]) == [[True] * 5] * 2
    for (raised,) in run(numbers_on_a_gpu, [18], [25]):
        assert "every rank must have the same in `backward`, but `metrics` differs" in raised.text


# --- no collective of their own ---


def collectives_of_steps(strategy, microbatch_size=None, **options):
    """Return the sizes of what `dist.all_reduce` sends in each of three steps."""
    model = wrap_model(network(), strategy, **options)
    data, sent, told = TensorDataset(*rows_of(15)), [], []
    reduce = dist.all_reduce

    def noting(tensor, *args, **kwargs):
        sent.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    with patch.object(dist, "all_reduce", noting):
        for batch in make_loader(data, 6, microbatch_size=microbatch_size, num_workers=0):
            model.zero_grad()
            sent.clear()
            loss = backward(model, squared_error, batch)
            told.append((list(sent), loss.item(), gradients(model)))
    for number, (_, loss, gradient) in enumerate(told):
        wanted, true = truth_of(*data[6 * number : 6 * number + 6])
        assert loss == pytest.approx(wanted, rel=CLOSE)
        assert off(gradient, true) < CLOSE
    return [counts for counts, *_ in told]


def test_a_step_has_one_collective_that_of_the_gradients():
    numbers = sum(parameter.numel() for parameter in network().parameters())
    numbers += 2 * 4 * TOLD  # of each rank, in words of 16 bits
    for first, *others in run(collectives_of_steps, "ddp", world_size=2):
        # What a step counts usually, and the gradients.
        assert len(first) == 2
        assert others == [[numbers], [numbers]]
    # What microbatches count is known, and one rank has two of them.
    for first, *others in run(collectives_of_steps, "ddp", 2, world_size=2):
        assert first == [numbers]
        assert others == [[numbers], [numbers]]


OPTIONS = [{"bucket_cap_mb": 0.0001}, {"gradient_as_bucket_view": True}, {"static_graph": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_they_travel_under_every_option_of_ddp(options):
    for *_, last in run(partial(collectives_of_steps, "ddp", **options), world_size=2):
        assert [number for number in last if number > TOLD]
        assert TOLD not in last


def mean_hook(told, bucket):
    told.append(bucket.index())
    reduced = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return reduced.then(lambda future: future.value()[0] / dist.get_world_size())


def beside_a_hook(kind):
    told = []
    if kind == "torch's class":
        model = DistributedDataParallel(network())
    else:
        model = wrap_model(network().bfloat16() if kind == "bfloat16" else network(), "ddp")
    if kind == "a hook":
        model.register_comm_hook(told, mean_hook)
    inputs, targets = rows_of(5)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float64
    own = local_range(5, world().rank, world().size)
    batch = [tensor[own.start : own.stop].to(dtype) for tensor in (inputs, targets)]
    for _ in range(3):
        model.zero_grad()
        loss = backward(model, squared_error, batch)
    error = off([g.double() for g in gradients(model)], truth_of(inputs, targets)[1])
    return loss.item(), error, told


@pytest.mark.parametrize("kind", ["a hook", "bfloat16", "torch's class"])
def test_where_gradients_cannot_carry_them_they_go_beside(kind):
    wanted, _ = truth_of(*rows_of(5))
    for loss, error, told in run(beside_a_hook, kind, world_size=2):
        close = 0.05 if kind == "bfloat16" else CLOSE
        assert loss == pytest.approx(wanted, rel=close)
        assert error < close
        assert told == ([0, 0, 0] if kind == "a hook" else [])


def other_backwards():
    """A plain `loss.backward()`, a copy and a pickled wrapper work beside and after a step."""
    model = wrap_model(network(), "ddp")
    backward(model, squared_error, cut(pieces((3, 3))))
    model.zero_grad()
    squared_error(model, cut(pieces((3, 3)))[0]).backward()
    found = [off(gradients(model), truth_of(*rows_of(6))[1])]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.zero_grad()
        backward(other, squared_error, cut(pieces((3, 3, 2))))
        found.append(off(gradients(other), truth_of(*rows_of(8))[1]))
    return found


def test_plain_backward_copies_and_pickles_work_after_a_step():
    assert max(map(max, run(other_backwards, world_size=2))) < CLOSE


# --- a batch that the loop has changed ---


def changed(how):
    """Change the batch, on one rank or on all, and return by how much the gradient is off."""
    model = wrap_model(network(), "ddp")
    errors = []
    for step, batch in enumerate(make_loader(TensorDataset(*rows_of(18)), 6, num_workers=0)):
        kept = list(batch)
        if how == "filtered" and world().rank == 0:
            kept = [tensor[tensor[:, 0] > -10][: 1 + step % 2] for tensor in kept]
        elif how == "sliced":
            kept = [tensor[: 3 - world().rank - step] for tensor in kept]
        elif how == "others":
            kept = [torch.cat([tensor, tensor]) for tensor in kept]
        model.zero_grad()
        loss = backward(model, squared_error, kept)
        whole = [torch.cat(parts) for parts in zip(*gathered(kept), strict=True)]
        wanted, true = truth_of(*whole)
        errors += [off(gradients(model), true), abs(loss.item() / wanted - 1)]
    check_in_sync(model)
    return errors


def gathered(batch):
    found = [None] * world().size
    dist.all_gather_object(found, batch)
    return found


@pytest.mark.parametrize("how", ["as it is", "filtered", "sliced", "others"])
def test_a_batch_that_the_loop_has_changed_counts_what_it_has(how):
    for errors in run(changed, how, world_size=2):
        assert max(errors) < CLOSE


# --- what a collate function makes of samples ---


class Numbers:
    """Six samples of shape (5, 7), of which one may be unreadable."""

    def __init__(self, *, corrupt=None):
        self.corrupt = corrupt

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return None if index == self.corrupt else torch.full((5, 7), float(index) / 7)


def readable(samples):
    kept = [sample for sample in samples if sample is not None]
    return torch.stack(kept) if kept else torch.zeros(0, 5, 7)


def all_left_out_under_exact(count):
    model = wrap_model(nn.Linear(7, 1, bias=False), "exact")
    with torch.no_grad():
        unwrap(model).weight.fill_(1.0)
    data = Numbers(corrupt=3)
    (batch,) = make_loader(data, 6, collate_fn=readable, num_workers=0, microbatch_size=1)
    return caught(lambda: backward(model, lambda m, x: m(x).mean(), batch, count=count).item())


@pytest.mark.parametrize("size", [1, 2])
def test_an_empty_microbatch_under_exact_requires_a_count(size):
    *others, found = run(all_left_out_under_exact, None, world_size=size)
    assert "under 'exact' `collate_fn` must keep all samples, but left some out: pass" in found.text
    assert found.type == "ValueError"
    assert all("failed in `backward`: ValueError" in other.text for other in others)
    assert run(all_left_out_under_exact, len, world_size=size) == [pytest.approx(2.4)] * size


# --- a gradient scaler ---


def scaled(strategy):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model = wrap_model(network(), strategy)
    return [backward(model, squared_error, cut(pieces((3, 3, 1))), scaler=scaler).item()]


@pytest.mark.parametrize(
    ("strategy", "size"), [("none", 1), ("ddp", 1), ("ddp", 3), ("exact", 1), ("exact", 3)]
)
def test_the_loss_that_is_returned_is_not_scaled(strategy, size):
    # What a scaler does else: tests/promises/test_strategies_by_features.py.
    for (loss,) in run(scaled, strategy, world_size=size):
        assert loss == pytest.approx(truth_of(*rows_of(7))[0], rel=1e-9)


# --- which step it is ---


def train_but(strayed, strategy):
    """Train, where the last rank does something else about the second step."""
    numbers = torch.arange(96.0, dtype=torch.float64).view(-1, 4)  # of four steps
    model = wrap_model(network(), strategy)
    loaders = [make_loader(TensorDataset(numbers), 6, microbatch_size=1) for _ in range(2)]
    is_last = world().rank == world().size - 1

    def loss_fn(model, batch):
        if strayed == "catches its own error" and is_last and number == 1:
            raise FloatingPointError
        return model(batch[0]).square().mean()

    for number, (own, other) in enumerate(zip(*loaders, strict=True)):
        if strayed == "leaves one out" and is_last and number == 1:
            continue
        batch = other if strayed == "takes another loader's" and is_last and number == 1 else own
        try:
            backward(model, loss_fn, batch)
        except FloatingPointError:
            continue


@pytest.mark.parametrize("strayed", ["leaves one out", "takes another loader's"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_at_different_steps_are_an_error_on_every_rank(strategy, strayed):
    for raised in run_caught(train_but, strayed, strategy, world_size=2):
        assert raised.type == "RuntimeError"
        assert "the same in `backward`, but `step` differs:\n" in raised.text
        assert "step='step 1 of epoch 0, of a loader with seed" in raised.text
        assert "Call `backward` for each step of one loader" in raised.text


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_that_one_rank_skips_raises_in_the_next(size):
    """Under fsdp the forward of the next step is taken for that of this one."""
    strayed = "catches its own error"
    for raised in run_caught(train_but, strayed, "fsdp", world_size=size):
        assert "`step` differs:\n" in raised.text

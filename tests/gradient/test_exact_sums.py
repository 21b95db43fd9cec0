"""The gradients of a step as sums in fixed point, in buckets."""

import math

import pytest
import torch
from on_ranks import run
from torch import nn

from pardata import world
from pardata.gradient import _exact_sums, _fixed_point
from pardata.gradient._exact_report import Largest
from pardata.gradient._exact_sums import Sums, emptied

CPU = torch.device("cpu")
SIZES = [1, 2, 3, 4]
LARGE = {"p", "p0", "p1"}  # parameters that have, or may have, a large gradient


def parameters(*shapes, dtype=torch.float32):
    return {f"p{n}": nn.Parameter(torch.zeros(s, dtype=dtype)) for n, s in enumerate(shapes)}


def sums_of(named, size=1, may_send=lambda: True):
    return Sums(named, size, Largest(list(named), CPU), may_send, emptied([], named, CPU))


def give(sums, name, gradient):
    parameter = sums.parameters[name]
    parameter.grad = gradient
    sums.take(parameter)
    assert parameter.grad is None


def finish(sums):
    sums.send_rest()
    sums.receive(sums.late(), LARGE)


def test_gradients_are_weighted_and_added():
    sums = sums_of(parameters(2, 3))
    for weight, factor in ((0.25, 1.0), (0.75, -2.0)):
        sums.begin(last=False)
        sums.weight = weight
        give(sums, "p0", factor * torch.tensor([1.0, 8.0]))
    finish(sums)
    assert sums.gradient("p0").tolist() == [-1.25, -10.0]
    assert sums.gradient("p1").tolist() == [0.0, 0.0, 0.0]
    assert sums.used == {"p0"}


def test_a_sum_is_math_fsum_rounded():
    many = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    sums = sums_of(parameters(40, dtype=torch.float64))
    for row in many:
        sums.begin(last=False)
        sums.weight = 1 / 50
        give(sums, "p0", row.double())
    finish(sums)
    for ours, column in zip(sums.gradient("p0").tolist(), many.t().tolist(), strict=True):
        assert ours == pytest.approx(math.fsum(x / 50 for x in column), rel=1e-14, abs=1e-18)


SHAPES = {
    "no dimensions": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "channels last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "complex": torch.tensor([[1 + 2j, -0.5j]]),
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "float64": torch.tensor([1.0, 2.0], dtype=torch.float64),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_a_gradient_comes_back_in_the_shape_dtype_and_layout_of_its_parameter(kind):
    start = SHAPES[kind]
    named = {"p": nn.Parameter(torch.zeros_like(start))}
    sums = sums_of(named)
    sums.begin(last=True)
    sums.weight = 0.5
    give(sums, "p", start.clone())
    finish(sums)
    gradient = sums.gradient("p")
    assert torch.equal(gradient, start / 2)
    assert (gradient.dtype, gradient.stride()) == (start.dtype, named["p"].stride())
    assert not gradient.requires_grad


def test_a_gradient_that_is_taken_is_not_changed():
    # It may be somebody's: a hook of the user's, or an expanded tensor.
    gradient = torch.ones(3, dtype=torch.float64)
    sums = sums_of(parameters(3, dtype=torch.float64))
    sums.begin(last=False)
    sums.weight = 0.1
    give(sums, "p0", gradient)
    assert gradient.tolist() == [1.0, 1.0, 1.0]


def test_without_weight_a_gradient_is_used_and_not_added_be_it_nan():
    sums = sums_of(parameters(2))
    sums.begin(last=True)
    give(sums, "p0", torch.full((2,), math.nan))
    finish(sums)
    assert sums.used == {"p0"}
    assert sums.gradient("p0").tolist() == [0.0, 0.0]


def test_the_weight_ends_with_its_microbatch():
    sums = sums_of(parameters(1))
    sums.begin(last=False)
    sums.weight = 1.0
    sums.begin(last=True)
    give(sums, "p0", torch.ones(1))
    finish(sums)
    assert sums.gradient("p0").tolist() == [0.0]


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_sparse_gradient_is_noted(weight):
    sums = sums_of(parameters((3, 2)))
    sums.begin(last=False)
    sums.weight = weight
    give(sums, "p0", torch.eye(3)[:, :2].to_sparse())
    assert sums.sparse == {"p0"}


def test_a_parameter_of_which_the_step_does_not_know_is_refused():
    sums = sums_of(parameters(2))
    other = nn.Parameter(torch.zeros(4))
    other.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"what is trained must not change within a step .*\(4,"):
        sums.take(other)


def test_too_many_gradients_are_refused(monkeypatch):
    monkeypatch.setattr(_fixed_point, "MOST", 7)
    sums = sums_of(parameters(1), size=3)
    sums.begin(last=False)
    sums.weight = 1e-3
    for _ in range(2):
        give(sums, "p0", torch.ones(1))
    text = r"at most 2 gradients on each of 3 ranks .* `p0` got more: make `microbatch_size` larger"
    with pytest.raises(OverflowError, match=text):
        give(sums, "p0", torch.ones(1))


# Buckets


def test_buckets_go_from_the_last_parameter_to_the_first_and_hold_whole_ones(monkeypatch):
    monkeypatch.setattr(_exact_sums, "_BUCKET", 10)
    sums = sums_of(parameters(4, 6, 3, 50, 1, 2, 0))
    assert [list(bucket.places) for bucket in sums.buckets] == [
        ["p6", "p5", "p4"],
        ["p3"],
        ["p2", "p1"],
        ["p0"],
    ]


def test_a_complex_number_takes_two_places(monkeypatch):
    monkeypatch.setattr(_exact_sums, "_BUCKET", 7)
    sums = sums_of(parameters(2, 2, dtype=torch.complex64))
    assert [list(bucket.places) for bucket in sums.buckets] == [["p1"], ["p0"]]


def test_nothing_to_train_is_no_bucket_to_wait_for():
    finish(sums_of({}))


def in_buckets(orders, lates, size_of_late=0.25):
    """Give gradients in this rank's order, some of them late, in buckets of 4 numbers."""
    _exact_sums._BUCKET = 4
    here = world()
    named = parameters(3, 4, 2, 1)
    sums = sums_of(named, here.size)
    sent = []
    send = torch.distributed.all_reduce

    def noting(words, *args, **options):
        sent.append(len(words))
        return send(words, *args, **options)

    torch.distributed.all_reduce = noting
    try:
        sums.begin(last=False)
        sums.weight = 0.5
        give(sums, "p0", torch.ones(3) / 4 ** (here.rank + 1))
        early = list(sent)
        sums.begin(last=True)
        sums.weight = 0.5
        for name in orders[here.rank % len(orders)]:
            give(sums, name, torch.full_like(named[name], 0.25))
        if here.rank in lates:
            give(sums, "p3", torch.full((1,), size_of_late))
        while_it_ran = list(sent)
        sums.send_rest()
        late = torch.tensor(sums.late())
        if here.size > 1:
            send(late, torch.distributed.ReduceOp.MAX)
        sums.receive(late.tolist(), {"p3"} if size_of_late > 1 else set())
    finally:
        torch.distributed.all_reduce = send
    return early, while_it_ran, sent, [sums.gradient(name).tolist() for name in named]


@pytest.mark.parametrize("size", SIZES)
def test_buckets_are_sent_in_one_order_whatever_is_complete_first_and_late_ones_again(size):
    orders = [["p3", "p2", "p1", "p0"], ["p0", "p1", "p2", "p3"], ["p2"], []]
    told = run(in_buckets, orders, [size - 1], world_size=size)
    ones = {name: sum(name in order for order in orders[:size]) / 8 for name in orders[0]}
    first = sum(0.5 / 4 ** (rank + 1) for rank in range(size))
    expected = [[ones["p0"] + first] * 3, [ones["p1"]] * 4, [ones["p2"]] * 2]
    late = 0.125
    for rank, (early, while_it_ran, sent, gradients) in enumerate(told):
        assert early == []  # before the last microbatch nothing is complete
        assert gradients == [*expected, [ones["p3"] + late]]
        if size > 1:
            # The last rank's late `p3` goes once more, on every rank, if its bucket had been sent.
            assert sent == [3, 4, 3, *([3] if size == 2 else [])]
            assert while_it_ran == {0: [3, 4, 3], 1: [3, 4, 3], 2: [3] * (size == 3)}.get(rank, [])


@pytest.mark.parametrize("size", SIZES)
def test_high_words_of_a_bucket_are_sent_at_the_end_where_any_rank_has_some(size):
    order = ["p3", "p2", "p1", "p0"]
    for lates in ([0], range(size)):  # so that it comes late, and only some ranks have high words
        told = run(in_buckets, [order], lates, 1e9 + 0.25, world_size=size)
        for _, while_it_ran, sent, gradients in told:
            assert gradients[3] == [pytest.approx(size / 8 + len(lates) * (5e8 + 0.125), rel=1e-7)]
            assert gradients[2] == [size / 8] * 2
            if size > 1:
                assert sent[3:] == [3, 3]  # the late low words, and the high ones
                assert while_it_ran == [3, 4, 3]


def test_the_words_of_a_step_lie_where_those_of_the_step_before_lay():
    named = parameters(3, 4)
    first = sums_of(named)
    first.begin(last=True)
    first.weight = 1.0
    give(first, "p0", torch.full((3,), 5.0))
    give(first, "p0", torch.full((3,), 0.5))
    finish(first)
    again = emptied(first.buckets, named, CPU)
    assert again is first.buckets
    assert not again[0].is_late
    second = Sums(named, 1, Largest(list(named), CPU), lambda: True, again)
    finish(second)
    assert second.gradient("p0").tolist() == [0.0, 0.0, 0.0]
    for others in (parameters(3), parameters(4, 3), parameters(3, 4, 1)):
        assert emptied(again, others, CPU)[0] is not again[0]
    assert emptied(again, named, torch.device("meta"))[0] is not again[0]


def disagreeing():
    named = parameters(3)
    sums = sums_of(named, world().size, may_send=lambda: False)
    sums.begin(last=True)
    sums.weight = 1.0
    give(sums, "p0", torch.ones(3))
    sums.send_rest()
    return [bucket.is_sent for bucket in sums.buckets]


def test_nothing_is_sent_where_the_ranks_do_not_agree():
    assert run(disagreeing, world_size=2) == [[False], [False]]

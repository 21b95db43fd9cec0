"""Losses and metrics that are means over something else than samples: the same at every size."""

import logging
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from common_gradients import CLOSE, Net, cut, gradients, network, off, pieces, rows_of
from logged import log_of
from on_ranks import caught, run
from torch import nn

from pardata import Mean, backward, world, wrap_model

STRATEGIES = ["ddp", "fsdp", "exact"]
WEIGHTS = torch.tensor([0.1, 0.7, 0.3], dtype=torch.float64)
STEPS = [(3, 1, 4, 2, 5), (2,)]  # of the second only one rank has something


def classes_of(batch):
    return batch[1].argmax(1)


def is_second(batch):
    return classes_of(batch) == 1


def weighted(model, batch):
    """Return the loss of classes with weights, which PyTorch divides by the sum of the weights."""
    return F.cross_entropy(model(batch[0]), classes_of(batch), WEIGHTS)


def weight_of(batch):
    return WEIGHTS[classes_of(batch)].sum()


def two_terms(model, batch):
    """Return a mean over samples, and one over those of a class: NaN where there are none."""
    outputs, chosen = model(batch[0]), is_second(batch)
    hits = outputs.argmax(1) == classes_of(batch)
    terms = {
        "samples": F.mse_loss(outputs, batch[1]),
        "of a class": outputs[chosen].square().sum(1).mean(),
        "masked": (outputs.exp().mean(1) * chosen).sum() / chosen.sum(),  # its gradient too is NaN
    }
    metrics = {
        "accuracy": Mean((hits & chosen).sum(), chosen.sum()),
        "never": Mean(0.0, 0),
        "of each column": Mean(batch[1].sum(0), len(batch[1])),
        "rows": float(len(hits)),
    }
    return terms, metrics


def counts_of(batch):
    ones = is_second(batch).sum()
    return {"of a class": ones, "masked": int(ones) * 0.7, "samples": len(batch[0])}


def truth(loss_fn, sizes):
    """Return the loss of the whole global batch in plain PyTorch, its gradients and metrics."""
    net, batch = network(), rows_of(sum(sizes))
    returned = loss_fn(net, batch)
    terms, metrics = returned if isinstance(returned, tuple) else (returned, None)
    loss = sum(terms.values()) if isinstance(terms, dict) else terms
    loss.backward()
    return loss.item(), gradients(net), metrics


def found(strategy, loss_fn, count, plain):
    results = []
    with log_of("pardata", logging.WARNING) as log:
        steps(results, strategy, loss_fn, count, plain)
    assert not log.lines
    return results


def steps(results, strategy, loss_fn, count, plain):
    model = wrap_model(network(), strategy)
    for sizes in STEPS if not plain else STEPS[:1]:
        for _ in range(2):  # a first step, and another
            model.zero_grad()
            batch = cut(pieces(sizes))
            if plain:
                batch = tuple(torch.cat(column) for column in zip(*batch, strict=True))
            results.append((backward(model, loss_fn, batch, count=count), gradients(model)))


CASES = [(strategy, plain) for strategy in STRATEGIES for plain in (False, True)][:-1]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("strategy", "plain"), CASES)
def test_a_loss_with_class_weights_is_that_of_the_global_batch(strategy, plain, size):
    for results in run(found, strategy, weighted, weight_of, plain, world_size=size):
        for (loss, gradient), sizes in zip(results, [s for s in STEPS for _ in "12"], strict=False):
            wanted, true, _ = truth(weighted, sizes)
            assert loss.item() == pytest.approx(wanted, rel=CLOSE)
            assert off(gradient, true) < CLOSE


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("strategy", "plain"), CASES)
def test_each_term_of_a_loss_has_the_denominator_of_the_global_batch(strategy, plain, size):
    for results in run(found, strategy, two_terms, counts_of, plain, world_size=size):
        for ((loss, metrics), gradient), sizes in zip(
            results, [s for s in STEPS for _ in "12"], strict=False
        ):
            wanted, true, means = truth(two_terms, sizes)
            if math.isnan(wanted):  # there is none of that class: the term is left out
                net, batch = network(), rows_of(sum(sizes))
                loss_alone = F.mse_loss(net(batch[0]), batch[1])
                loss_alone.backward()
                wanted, true = loss_alone.item(), gradients(net)
            assert loss.item() == pytest.approx(wanted, rel=CLOSE)
            assert off(gradient, true) < CLOSE
            accuracy, never, columns, _ = means.values()
            torch.testing.assert_close(
                metrics["accuracy"], accuracy.total / accuracy.count, equal_nan=True
            )
            assert (never.count, math.isnan(metrics["never"])) == (0, True)
            torch.testing.assert_close(metrics["of each column"], columns.total / columns.count)


@pytest.mark.parametrize(("loss_fn", "count"), [(weighted, weight_of), (two_terms, counts_of)])
def test_under_exact_fractions_are_the_same_bits_at_every_size(loss_fn, count):
    texts = set()
    for size in (1, 2, 3, 4):
        for results in run(found, "exact", loss_fn, count, False, world_size=size):
            texts.add(repr([(str(r), [g.tolist() for g in gs]) for r, gs in results]))
    assert len(texts) == 1


def by_tenths():
    """Return the bits of a step whose counts have another sum in another order: 0.1, 0.2, 0.3."""
    model, tenths = wrap_model(network(), "exact"), {1: 0.1, 2: 0.2, 4: 0.3}
    loss = backward(model, weighted, cut(pieces((1, 2, 4))), count=lambda b: tenths[len(b[0])])
    return loss.item().hex(), [gradient.tolist() for gradient in gradients(model)]


def test_under_exact_a_sum_of_fractions_is_rounded_once():
    assert math.fsum([0.1, 0.2]) + 0.3 != math.fsum([0.1, 0.2, 0.3])
    found = [told for size in (1, 2, 3) for told in run(by_tenths, world_size=size)]
    assert found == [found[0]] * len(found)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, rows):
        return {"one": self.one(rows), "other": self.other(rows)}


def a_head_for_each():
    """Return the gradients of two heads, one of which counts only what one rank has."""
    model = wrap_model(network(TwoHeads), "ddp")
    rows = rows_of(3)[0] if world().rank == 0 else -rows_of(3)[0].abs()

    def loss_fn(model, rows):
        found, chosen = model(rows), rows[:, 0] > 0
        return {"one": found["one"].mean(), "other": found["other"][chosen].mean()}

    for _ in range(2):
        model.zero_grad()
        backward(model, loss_fn, rows, count=lambda b: {"one": 3, "other": (b[:, 0] > 0).sum()})
    chosen = rows_of(3)[0][rows_of(3)[0][:, 0] > 0]
    wanted = network(TwoHeads)
    wanted(chosen)["other"].mean().backward()
    return off(gradients(model)[2:], gradients(wanted)[2:])


def test_a_head_without_samples_on_one_rank_trains_on_the_other():
    assert max(run(a_head_for_each, world_size=2)) < CLOSE


def test_a_mean_is_no_mean_of_means():
    """Of microbatches of unlike numbers, in one process; the loss alone has the other weights."""
    batch = cut(pieces((1, 4)))

    def loss_fn(model, batch):
        return model(batch[0]).mean(), [Mean(len(batch[0]) ** 2, len(batch[0])), len(batch[0])]

    _, (mean, weighted_mean) = backward(Net().double(), loss_fn, batch)
    assert (mean, weighted_mean) == (17 / 5, 17 / 5)
    _, (mean, weighted_mean) = backward(Net().double(), loss_fn, batch, count=lambda _: 1)
    assert (mean, weighted_mean) == (17 / 5, 2.5)


# --- what is refused, on every rank ---


def one_term(model, batch):
    return {"samples": model(batch[0]).mean()}


def unlike_names(batch):
    return {"samples": len(batch[0]), **({"more": 1} if len(batch[0]) == 1 else {})}


def too_many_on_one(batch):
    return {str(n): 1 for n in range(100)} if world().rank == 0 else {"samples": len(batch[0])}


def unlike_ranks(_batch):
    return {"one": 1} if world().rank else {"other": 1}


def fails_on_one(batch):
    if world().rank == world().size - 1:
        raise KeyError("labels")
    return len(batch[0])


# One loss, negative counts and what is no number: tests/promises/errors.md.
WRONG = {
    "names of microbatches": (one_term, unlike_names, "`count` must return the same names, at"),
    "too many names": (one_term, too_many_on_one, "at most 32"),
    "names of ranks": (one_term, unlike_ranks, "every rank must pass the same to `backward`"),
    "no dict of counts": (one_term, None, "for a dict let `count` return a number for each"),
    "no text as a name": (one_term, lambda _: {"": 1}, "`count` must name terms by texts, but"),
    "other terms": (one_term, lambda _: {"it": 1}, "a dict with keys ['it'], as `count`, but"),
    "an error on one rank": (weighted, fails_on_one, "labels"),
}


SIZES = (3, 1) * 3  # two microbatches for each of 3 ranks


def refused(strategy, name):
    model = wrap_model(network(), strategy)
    loss_fn, count, _ = WRONG[name]
    batch = cut(pieces(SIZES))
    raised = caught(lambda: backward(model, loss_fn, batch, count=count))
    fine = backward(model, weighted, batch, count=weight_of)  # and the group is usable afterwards
    return str(raised), fine.item()


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("size", [1, 3])
def test_what_cannot_be_weighted_is_an_error_on_every_rank(name, size):
    if name == "names of ranks" and size == 1:
        pytest.skip("one rank differs from none")
    for rank, (raised, fine) in enumerate(run(refused, "ddp", name, world_size=size)):
        if name != "too many names" or rank == 0:
            assert WRONG[name][2] in raised
        assert fine == pytest.approx(truth(weighted, SIZES)[0], rel=CLOSE)


def fails_on_the_last(count):
    """Raise in `loss_fn` on one rank before it knows what the others count; then train on."""
    model, is_last = wrap_model(network(), "exact"), world().rank == world().size - 1

    def loss_fn(model, batch):
        if is_last:
            raise OSError("no such file")
        return weighted(model, batch)

    batch = cut(pieces(SIZES))
    raised = caught(lambda: backward(model, loss_fn, batch, count=count))
    return str(raised), backward(model, weighted, batch, count=weight_of).item()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_failing_rank_leaves_no_fraction_in_the_exact_sum(size):
    *others, last = run(fails_on_the_last, weight_of, world_size=size)
    assert last[0] == "OSError: no such file"
    assert all(" failed in `backward`: " in raised for raised, _ in others)
    wanted = pytest.approx(truth(weighted, SIZES)[0], rel=CLOSE)
    assert [loss for _, loss in (*others, last)] == [wanted] * size


def test_a_batch_whose_first_tensor_has_no_rows_says_so():
    boxes, rows = torch.zeros(0, 4), torch.ones(3, 4)
    with pytest.raises(ValueError, match="put a tensor with a row for each sample first"):
        backward(
            nn.Linear(4, 1),
            lambda model, batch: {"a": model(batch["rows"]).mean()},
            {"boxes": boxes.long(), "rows": rows},
            count=lambda batch: {"a": len(batch["rows"])},
        )

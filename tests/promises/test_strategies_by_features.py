"""Every strategy with every feature of a training: as plain PyTorch in one process, or an error.

Each cell trains at 1 and 3 ranks, over uneven microbatches and with stand-ins, and is compared with
a loop by hand. `docs/concepts.md` holds the table.
"""

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from on_ranks import Raised, caught, run
from sharding import whole
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from pardata import backward, check_in_sync, fingerprint, make_loader, unwrap, wrap_model

PAGE = Path(__file__).parents[2] / "docs/concepts.md"
TROUBLESHOOTING = PAGE.with_name("troubleshooting.md")
STRATEGIES = ["none", "dp", "ddp", "fsdp", "exact"]


@dataclasses.dataclass
class Answer:
    scores: torch.Tensor


class Shared(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight

    def forward(self, rows):
        return self.other(torch.relu(self.one(rows)))


class Unused(nn.Identity):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(8, 8)


class Recomputed(nn.Linear):
    def forward(self, rows):
        return checkpoint(super().forward, rows, use_reentrant=False)


class Net(nn.Module):
    def __init__(self, middle, answer):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 8), middle(), nn.Linear(8, 3)
        self.answer = answer

    def forward(self, rows):
        scores = self.last(torch.tanh(self.middle(self.first(rows))))
        return scores if self.answer is None else self.answer(scores=scores)


class Feature(NamedTuple):
    """What differs from a plain training.

    Attributes:
        middle: makes the part of the model in its middle.
        answer: makes what the model returns, of its scores.
        before: is done to the model before it is wrapped.
        after: … and after.
        half: of autocast.
        overflows: whether to train with a gradient scaler, whose first scale is too large.
        clips: whether to clip gradients.
        every: at so many batches the optimizer does a step.
        microbatch_size: of the loader.
        options: of `wrap_model`.
        sharding: … under "fsdp" alone.
        close: how close the weights come to those of the loop by hand; None for not at all.
    """

    middle: Callable[[], nn.Module] = nn.Identity
    answer: Any = None
    before: Callable[[nn.Module], nn.Module] = lambda model: model
    after: Callable[[nn.Module], nn.Module] = lambda model: model
    half: torch.dtype | None = None
    overflows: bool = False
    clips: bool = False
    every: int = 1
    microbatch_size: int | None = 3
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed
    sharding: dict[str, Any] = {}  # noqa: RUF012  # likewise
    close: float | None = 1e-5


def compiled(model):
    return torch.compile(model, backend="aot_eager", dynamic=False)


def compiled_in_place(model):
    model.compile(backend="aot_eager", dynamic=False)
    return model


def compiled_blocks(model):
    for name in ("first", "middle", "last"):
        setattr(model, name, compiled(getattr(model, name)))
    return model


def linear():
    return nn.Linear(8, 8)


IN_PLACE = "`model.compile()`, in place"
IN_BLOCKS, OFFLOADED = "sharded by `blocks=`", "kept on the CPU by `offload_policy=`"
FIND = "unused parameters, `find_unused_parameters=True`"
FEATURES = {
    "a plain model": Feature(),
    "autocast to bfloat16": Feature(half=torch.bfloat16, close=0.02),
    "autocast to float16, a gradient scaler": Feature(
        half=torch.float16, overflows=True, close=0.01
    ),
    "gradient clipping": Feature(clips=True),
    "`torch.compile` before `wrap_model`": Feature(before=compiled),
    "`torch.compile` after `wrap_model`": Feature(after=compiled),
    IN_PLACE: Feature(before=compiled_in_place),
    "`torch.compile` of each block": Feature(
        linear, before=compiled_blocks, sharding={"blocks": nn.Linear}
    ),
    "activation checkpointing": Feature(
        functools.partial(Recomputed, 8, 8), sharding={"blocks": Recomputed}
    ),
    IN_BLOCKS: Feature(linear, options={"blocks": nn.Linear}),
    OFFLOADED: Feature(linear, options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "accumulation over several batches of the loader": Feature(every=2),
    "frozen parameters": Feature(lambda: nn.Linear(8, 8).requires_grad_(False)),
    "shared parameters": Feature(Shared),
    "unused parameters": Feature(Unused),
    FIND: Feature(Unused, options={"find_unused_parameters": True}),
    "a model that returns a dict": Feature(answer=dict),
    "a model that returns a dataclass": Feature(answer=Answer),
    "batch norm": Feature(lambda: nn.BatchNorm1d(8)),
    "dropout": Feature(nn.Dropout, close=None),
}


def loss_of(feature, model, batch):
    rows, targets = batch
    with torch.autocast("cpu", feature.half or torch.bfloat16, enabled=feature.half is not None):
        output = model(rows)
        scores = output["scores"] if isinstance(output, dict) else output
        return F.cross_entropy(getattr(scores, "scores", scores), targets)


def by_hand(model, loss_fn, batch, scaler):
    """Do what `backward` does, in one process, as plain PyTorch."""
    parts = [batch] if isinstance(batch[0], torch.Tensor) else batch
    for rows, targets in parts:
        part = len(rows) / sum(len(rows) for rows, _ in parts)
        scaler.scale(part * loss_fn(model, (rows, targets))).backward()


def trained(name, strategy):
    """Train four steps; return the weights, what the scaler's scale was, and a fingerprint."""
    warnings.simplefilter("ignore")  # dynamo's own
    feature = FEATURES[name]
    if is_slow(name):  # as in a process that compiles this model alone: what is compiled is counted
        torch._dynamo.reset()
    torch.manual_seed(0)
    model = feature.before(Net(feature.middle, feature.answer))
    if strategy is not None:
        options = {**feature.options, **(feature.sharding if strategy == "fsdp" else {})}
        model = feature.after(wrap_model(model, strategy, **options))
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(29, 4, generator=numbers), torch.arange(29) % 3)
    how = {"microbatch_size": feature.microbatch_size, "drop_last": False, "seed": 0}
    alone = {"distributed": False} if strategy in (None, "none") else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler(
        "cpu", 2.0**100, backoff_factor=2.0**-95, growth_interval=2, enabled=feature.overflows
    )
    scales = []
    for step, batch in enumerate(make_loader(data, 8, shuffle=True, **how, **alone), 1):
        run_backward = by_hand if strategy is None else backward
        run_backward(model, functools.partial(loss_of, feature), batch, scaler=scaler)
        if step % feature.every:
            continue
        if feature.clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        check_in_sync(model)
    return weights_of(model), scales, fingerprint(model)


def weights_of(model):
    return [whole(parameter.detach()) for parameter in unwrap(model).parameters()]


def all_trained(cells):
    return {cell: caught(trained, *cell) for cell in cells}


CELLS = [(name, strategy) for name in FEATURES for strategy in STRATEGIES]
ALONE = "strategy 'dp' must run in one process, without SyncBatchNorm, but has "
NO_OPTION = " has no option {!r}: it has "
OTHERS = ("none", "dp", "ddp", "exact")
ERRORS = {
    (IN_PLACE, "exact"): "but a Net was compiled in place, where that cannot be ",
    ("unused parameters", "ddp"): "every parameter must take part in the loss, but ",
    **{(FIND, s): NO_OPTION.format("find_unused_parameters") for s in ("dp", "fsdp", "exact")},
    **{(IN_BLOCKS, strategy): NO_OPTION.format("blocks") for strategy in OTHERS},
    **{(OFFLOADED, strategy): NO_OPTION.format("offload_policy") for strategy in OTHERS},
}
OLDER_ERRORS = {
    ("a model that returns a dataclass", "fsdp"): " must return a dict, not dataclass Answer, "
}


def sizes_of(strategy):
    return (1,) if strategy == "none" else (1, 3)  # without a strategy each rank trains by itself


@functools.cache
def told_at(size, slow):
    cells = [c for c in CELLS if is_slow(c[0]) == slow and size in sizes_of(c[1])]
    return run(all_trained, cells, world_size=size, timeout=300)


@functools.cache
def truth(name):
    return trained(name, None)


def is_slow(name):
    return "compile" in name


def check_weights(name, told):
    weights, scales, _ = truth(name)
    assert told[1] == scales
    close = FEATURES[name].close
    if close is not None:
        torch.testing.assert_close(told[0], weights, rtol=0, atol=close)


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, marks=[pytest.mark.soak] * is_slow(c[0]), id="-".join(c)) for c in CELLS],
)
def test_a_strategy_trains_a_feature_as_plain_pytorch_or_says_why_not(cell):
    name, strategy = cell
    errors = ERRORS | (OLDER_ERRORS if torch.__version__ < "2.12" else {})
    fingerprints = set()
    for size in sizes_of(strategy):
        error = errors.get(cell, ALONE if size > 1 and strategy == "dp" else None)
        for ranks in told_at(size, is_slow(name)):
            told = ranks[cell]
            assert isinstance(told, Raised) == (error is not None), told
            if error is not None:
                assert error in told.text
            else:
                check_weights(name, told)
                fingerprints.add(told[2])
    assert strategy != "exact" or len(fingerprints) <= 1


def test_the_scaler_overflows_and_grows_and_what_is_frozen_or_clipped_shows():
    assert truth("autocast to float16, a gradient scaler")[1] == [32, 32, 64, 64]
    assert len({truth(name)[2] for name in FEATURES if not is_slow(name)}) == 11


def test_the_page_has_this_table_and_troubleshooting_the_errors():
    rows = [["feature", *(f'`"{strategy}"`' for strategy in STRATEGIES)], ["---"] * 6]
    for name, feature in FEATURES.items():
        words = ["error" if (name, strategy) in ERRORS else "yes" for strategy in STRATEGIES]
        rows.append([name, *(words if feature.close else ["its own"] * 4 + ["yes"])])
    assert "\n".join("| " + " | ".join(row) + " |" for row in rows) in PAGE.read_text()
    over_all_ranks = "`sync_batchnorm` must be False under strategy 'exact'"  # on a CPU never else
    quoted = " ".join(TROUBLESHOOTING.read_text().replace("\n> ", " ").split())
    for error in [ALONE, over_all_ranks, *ERRORS.values()]:
        without_name = re.sub(r"(?<=option )'\w+'", "…", error)
        assert without_name.strip(" ,") in quoted

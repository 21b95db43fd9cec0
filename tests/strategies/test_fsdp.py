"""Strategy "fsdp" in one call: block by block, in replicas of shards, from rank 0's weights."""

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo.utils
from logged import log_of
from on_ranks import caught, run
from sharding import whole
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

import pardata
from pardata import backward, check_in_sync, fingerprint, make_loader, world, wrap_model
from pardata.model._unwrap import ShardedModule
from pardata.strategies import _fsdp
from pardata.strategies._fsdp_blocks import blocks_of

SOURCE = Path(pardata.__file__).parent


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x):
        return x + self.inner(x)


class Net(nn.Module):
    """Blocks between two layers with one weight, and a buffer that is in no state dict."""

    def __init__(self, width=8, blocks=3):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.rand(width), persistent=False)

    def forward(self, x):
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def seeded(seed=0, **sizes):
    torch.manual_seed(seed)
    return Net(**sizes).double()


def mean_loss(model, batch):
    return model(batch[0]).square().mean()


def train(model):
    """Return the losses, of shares that differ, and the gradients and weights at the end."""
    rows = torch.randn(26, 8, generator=torch.Generator().manual_seed(1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in make_loader(TensorDataset(rows), 10, microbatch_size=2, drop_last=False):
        optimizer.zero_grad()
        losses.append(backward(model, mean_loss, batch))
        optimizer.step()
    check_in_sync(model)
    gradients = [whole(p.grad) for p in model.parameters()]
    return torch.stack(losses), *gradients, *(whole(p.detach()) for p in model.parameters())


def trained(strategy, options):
    return train(wrap_model(seeded(), strategy, **options))


def alike(found, expected):
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for one, other in pairs)


# --- block by block


def sharded_parts(blocks):
    model = wrap_model(seeded(), "fsdp", blocks=blocks)
    return [name for name, part in model.named_modules() if isinstance(part, ShardedModule)]


@pytest.mark.parametrize(
    ("blocks", "parts"),
    [
        (None, []),
        ("auto", ["blocks.0", "blocks.1", "blocks.2"]),
        (Block, ["blocks.0", "blocks.1", "blocks.2"]),
        ([Block, nn.Sequential], [f"blocks.{n}{end}" for n in range(3) for end in ("", ".inner")]),
    ],
    ids=str,
)
def test_blocks_are_sharded_before_the_root(blocks, parts):
    assert run(sharded_parts, blocks, world_size=2) == [["", *parts]] * 2


def listed(*modules):
    return nn.ModuleList(modules)


def test_auto_takes_the_modules_of_the_outermost_lists_that_hold_a_tenth():
    net = nn.Module()
    net.many = listed(Block(8), listed(Block(8), nn.ReLU()), nn.Sequential(*listed(Block(8))))
    net.few = listed(nn.Linear(4, 4))
    net.rest = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    many = net.many
    # Inner ones first: sharding goes from the inside to the outside.
    assert blocks_of(net, "auto") == [many[1][0], many[0], many[2]]
    del net.many  # a list with a tenth is left
    assert blocks_of(net, "auto") == [net.few[0]]
    compiled = torch.compile(Block(8), backend="eager")
    assert blocks_of(nn.Sequential(listed(compiled)), "auto") == [compiled._orig_mod]


def by_hand_and_named():
    from torch.distributed.fsdp import fully_shard

    net = seeded()
    fully_shard(net.blocks[1])
    return train(wrap_model(net, "fsdp", blocks="auto"))


@pytest.mark.parametrize("size", [2, 4])
def test_the_gradient_is_that_of_ddp_in_blocks_and_in_replicas(size):
    expected = run(trained, "ddp", {}, world_size=size)[0]
    replicas = [n for n in (2, 4) if size % n == 0]
    ways = [{"blocks": "auto"}, *({"blocks": Block, "replicate": np.int64(n)} for n in replicas)]
    for options in ways:
        for found in run(trained, "fsdp", options, world_size=size):
            assert alike(found, expected), options
    for found in run(by_hand_and_named, world_size=size):
        assert alike(found, expected)


def layout(replicate):
    model = wrap_model(seeded(), "fsdp", replicate=replicate, blocks="auto")
    meshes = {str(p.device_mesh.mesh.tolist()) for p in model.parameters()}
    return meshes, {str(p.placements) for p in model.parameters()}


def test_neighbours_share_one_replica():
    two = {"[[0, 1], [2, 3]]"}, {"(Replicate(), Shard(dim=0))"}
    assert run(layout, 2, world_size=4) == [two] * 4
    assert run(layout, 1, world_size=4) == [({"[0, 1, 2, 3]"}, {"(Shard(dim=0),)"})] * 4


def warned(largest, options):
    _fsdp._LARGE = largest
    try:
        with log_of("pardata") as log:
            for _ in range(2):
                wrap_model(Net(width=900, blocks=4), "fsdp", **options)
    finally:
        _fsdp._LARGE = 10**8
    return [line for line in log.lines if "root" in line]


def test_a_large_model_without_blocks_warns_of_its_peak_memory():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    text = (
        "[0/2] Net is sharded at its root alone: a rank holds all {} GB at once; pass blocks='auto'"
    )
    half = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for most, options, lines in [
        (4.1e6, {}, []),
        (4e6, {}, [text.format("0.02")]),
        (4e6, half, [text.format("0.01")]),
        (4e6, {"blocks": "auto"}, []),
    ]:
        assert run(warned, most, options, world_size=2) == [lines, []]


# --- from rank 0's weights alone


class Peak(TorchDispatchMode):
    """Counts the bytes that tensors hold at once, as far as they are made within."""

    def __init__(self):
        super().__init__()
        self.most = self._now = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if is_real(t)}
        for storage in {t.untyped_storage() for t in tree_leaves(made) if is_real(t)}:
            if storage._cdata not in given:
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return made

    def _add(self, size):
        self._now += size
        self.most = max(self.most, self._now)


def is_real(value):
    return isinstance(value, torch.Tensor) and not value.is_meta


def wrapped_from_meta(**options):
    """Wrap a model with weights on rank 0 alone; return it, its bytes and how many were made."""
    with torch.device("cpu" if world().is_main else "meta"):
        net = seeded(width=64, blocks=16)
    size = sum(p.nbytes for p in net.parameters())
    with Peak() as peak:
        model = wrap_model(net, "fsdp", **options)
    return model, size, peak.most


def filled_from_rank_0():
    model, size, most = wrapped_from_meta(blocks="auto", replicate=world().size // 4 or 1)
    _, _, of_whole = wrapped_from_meta()
    check_in_sync(model)
    same = model.first.weight is model.last.weight
    return fingerprint(model), same, most / size, of_whole / size


def test_weights_of_rank_0_fill_meta_models_block_by_block():
    for found, is_shared, part, of_whole in run(filled_from_rank_0, world_size=4):
        assert found == fingerprint(seeded(width=64, blocks=16))
        assert is_shared
        assert part < 0.6
        assert of_whole > 1


def trained_from_meta():
    with torch.device("cpu" if world().is_main else "meta"):
        net = seeded()
    return train(wrap_model(net, "fsdp", blocks="auto"))


def test_what_was_filled_trains():
    expected = run(trained, "ddp", {}, world_size=2)[0]
    assert all(alike(found, expected) for found in run(trained_from_meta, world_size=2))


def ignoring(kind):
    """Leave a frozen table alone; return whether it and a trained layer are sharded, and it."""
    with torch.device("cpu" if world().is_main else kind):
        torch.manual_seed(world().rank)
        net = nn.Sequential(nn.Embedding(6, 4).requires_grad_(False), nn.Linear(4, 4))
    model = wrap_model(net, "fsdp", ignored_params={net[0].weight})
    backward(model, lambda model, batch: model(batch).square().mean(), torch.arange(6))
    table, layer = (hasattr(part.weight, "device_mesh") for part in model)
    return table, layer, model[0].weight.detach().clone()


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_ignored_parameters_are_not_sharded_and_come_from_rank_0(kind):
    ranks = run(ignoring, kind, world_size=2)
    for table, layer, weight in ranks:
        assert (table, layer) == (False, True)
        assert torch.equal(weight, ranks[0][2])


# --- gradients of several calls and microbatches ---


def accumulated(microbatch_size, options):
    """Accumulate between other passes; return the distance from PyTorch's, and errors."""
    plain, model = seeded(), wrap_model(seeded(), "fsdp", **options)
    rows = torch.randn(24, 8, generator=torch.Generator().manual_seed(1)).double()
    for batch in make_loader(TensorDataset(rows), 8, microbatch_size=microbatch_size):
        model(rows)  # an evaluation without no_grad()
        broken = model.last.register_forward_hook(lambda *_: 1 / 0)
        assert caught(model, rows).type == "ZeroDivisionError"
        broken.remove()
        backward(model, mean_loss, batch)
    for part in rows.split(8):
        mean_loss(plain, [part]).backward()
    model.set_requires_gradient_sync(False)
    texts = {caught(backward, model, mean_loss, batch).text}
    model(rows).sum().backward()
    model.set_requires_gradient_sync(True)
    texts.add(caught(backward, model, mean_loss, batch).text)
    if "replicate" in options and world().size > 1:
        model.set_requires_all_reduce(False)
        model(rows).sum().backward()
        texts.add(caught(backward, model, mean_loss, batch).text)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max((whole(p.grad) - q.grad).abs().max().item() for p, q in pairs), texts


@pytest.mark.parametrize("microbatch_size", [None, 1])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_gradient_is_lost_between_steps(size, microbatch_size):
    for options in ({}, {"blocks": "auto", "replicate": size}):
        for distance, texts in run(accumulated, microbatch_size, options, world_size=size):
            assert distance < 1e-12
            (text,) = texts
            assert text == (
                "gradients are left unreduced: call set_requires_gradient_sync(True) and `backward`"
            )


def held_in_each_microbatch(replicate):
    """Return how many numbers the gradients here have before each microbatch, and should have."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    model = wrap_model(net, "fsdp", blocks=[nn.Linear], replicate=replicate)
    held = []

    def loss_fn(model, batch):
        gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        held.append(sum(gradient.numel() for gradient in gradients))
        return model(batch[0]).square().mean()

    rows = TensorDataset(torch.randn(12, 16))
    loader = make_loader(rows, 12, microbatch_size=1, seed=0)
    with CommDebugMode() as seen:
        for batch in loader:
            backward(model, loss_fn, batch)
    kinds = {str(kind).rpartition(".")[2]: n for kind, n in seen.get_comm_counts().items()}
    scattered = sum(n for kind, n in kinds.items() if "reduce_scatter" in kind)
    return held, sum(p.to_local().numel() for p in model.parameters()), scattered


@pytest.mark.skipif(torch.__version__ < "2.12", reason="CommDebugMode counts one forward alone")
@pytest.mark.parametrize("size", [2, 4])
def test_each_microbatch_leaves_the_shards_of_the_gradients_alone(size):
    """A rank that kept them whole would hold all of the model, which sharding is to avoid."""
    replicate = size // 2
    for held, shards, scattered in run(held_in_each_microbatch, replicate, world_size=size):
        microbatches = 12 // size
        expected = [0] + [shards if replicate == 1 else 0] * (microbatches - 1)
        assert held == expected
        assert scattered == 4 * microbatches  # one for each block


# --- torch.compile


def compiled_frames():
    """Train and evaluate compiled models; return which files of pardata dynamo has compiled."""
    torch._dynamo.utils.clear_compilation_metrics()
    for blocks in (1, 2):
        net = nn.Sequential(Net(blocks=blocks), nn.BatchNorm1d(8))
        model = wrap_model(torch.compile(net, backend="eager"), "fsdp")
        model(torch.ones(4, 8)).sum().backward()
        with torch.no_grad():
            model(torch.ones(4, 8))
    files = [Path(one.co_filename) for one in torch._dynamo.utils.get_compilation_metrics()]
    assert Path(__file__) in files
    return [file.name for file in files if SOURCE in file.parents]


def test_no_frame_of_pardata_counts_against_the_limit_of_recompilations():
    assert run(compiled_frames, world_size=2) == [[], []]

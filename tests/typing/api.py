"""The public types, as a user's checker sees them: never run, read by mypy and pyright.

`assert_type` fails in both directions: a type that became wider fails as one that became narrower.
"""

import signal
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, TensorDataset

import pardata
from pardata.testing import assert_same_at_every_world_size, run


def download(url: str, tries: int) -> Path:
    """Take two arguments and return a third type."""
    raise NotImplementedError


class Net(nn.Module):
    """Some model."""


class Words(Dataset[str]):
    """A dataset of no tensors."""


class Lines(IterableDataset[str]):
    """A stream."""

    def __iter__(self) -> Iterator[str]:
        """Yield what there is."""
        raise NotImplementedError


def normalized(batch: Tensor) -> Tensor:
    """Stand for what is done to a batch on its device."""
    raise NotImplementedError


def the_world() -> None:
    assert_type(pardata.__version__, str)
    assert_type(pardata.init(), pardata.World)
    pardata.init(backend="gloo", timeout=timedelta(minutes=1), device="cpu", tune_cpu=False)
    pardata.init(hang_after=timedelta(minutes=2))
    with pardata.init(device=torch.device("cpu")) as entered:
        assert_type(entered, pardata.World)
    here = pardata.world()
    assert_type(here, pardata.World)
    assert_type((here.rank, here.size), tuple[int, int])
    assert_type((here.local_rank, here.local_size), tuple[int, int])
    assert_type((here.node_rank, here.num_nodes), tuple[int, int])
    assert_type(here.device, torch.device)
    assert_type(here.backend, str | None)
    assert_type(here.launcher, str)
    assert_type((here.is_main, here.is_local_main), tuple[bool, bool])
    here.rank = 1  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]  # frozen
    pardata.init("gloo")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]  # by name only

    pardata.barrier()
    pardata.barrier("saved", timeout=timedelta(seconds=1))

    with pardata.rank_zero_first(local=True, timeout=timedelta(hours=1)) as nothing:
        assert_type(nothing, None)

    assert_type(pardata.rank_zero_call(download, "https://example.org", 3), Path)
    pardata.rank_zero_call(download, "https://example.org")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]  # one is missing


def the_model() -> None:
    net = Net()
    assert_type(pardata.wrap_model(net), nn.Module)
    pardata.wrap_model(net, "ddp", device="cpu", sync_batchnorm=True, find_unused_parameters=True)
    pardata.wrap_model(net, strategy="dp", device_ids=[0, 1], device=torch.device("cuda"))
    pardata.wrap_model(net, "dpp")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # no such
    assert_type(pardata.unwrap(pardata.wrap_model(net)), nn.Module)

    loaded = pardata.load_weights(net, {"weight": torch.ones(1)}, strict=False, assign=True)
    assert_type(loaded, pardata.LoadedKeys)
    assert_type((loaded.missing_keys, loaded.unexpected_keys), tuple[list[str], list[str]])
    pardata.load_weights(net, Path("weights.pt"))
    assert_type(pardata.fingerprint(net), str)
    pardata.check_in_sync(net)


def the_data() -> None:
    loader = pardata.make_loader(Words(), 32)
    assert_type(loader, pardata.Loader)
    pardata.make_loader(
        TensorDataset(torch.arange(4)),
        batch_size=2,
        distributed="auto",
        shuffle=True,
        drop_last=None,
        microbatch_size=1,
        sharded=False,
        num_workers="auto",
        seed=None,
        reproducible=True,
        device="auto",
        batch_transform=normalized,
        prefetch=1,
        collate_fn=list,
        pin_memory=None,
        timeout=1.5,
        worker_init_fn=print,
        multiprocessing_context="spawn",
        prefetch_factor=2,
        persistent_workers=False,
    )
    pardata.make_loader(Words(), 2, distributed=False, sampler=RandomSampler([1, 2]), device=None)
    pardata.make_loader(
        Words(), batch_sampler=BatchSampler(RandomSampler([1, 2]), 2, drop_last=False)
    )
    pardata.make_loader(Words(), batch_sampler=[[0, 1], (2,)])
    pardata.make_loader(Words(), batch_sampler=[0, 1])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]  # no lists
    pardata.make_loader(Words(), 2, cost=[1, 2.5])
    pardata.make_loader(Words(), 2, cost=torch.ones(2))
    pardata.make_loader(Words(), 2, cost=lambda index: 2.0 * index)
    pardata.make_loader(Words(), 2, cost=2)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # no numbers
    mixture = pardata.Mixture({"words": (Words(), 0.5), "list": (["a"], 2)}, length=3, named=True)
    mixture.set_epoch(1, seed=2)
    assert_type(len(mixture), int)
    pardata.make_loader(mixture, 2)
    pardata.Mixture(Words(), weights=torch.ones(2))
    pardata.Mixture([1, 2], weights=[1, 2.5])
    pardata.make_loader(Lines(), 2, microbatch_size=None, sharded=True, batch_transform=None)
    assert_type(pardata.cache_dataset(Words()), pardata.CachedDataset)
    pardata.make_loader(pardata.cache_dataset(Words(), Path("cache"), num_workers="auto"), 2)
    assert_type(len(loader), int)
    assert_type(loader.batch_size, int | None)
    assert_type(loader.epoch, int)
    assert_type(loader.dataset, Dataset[Any])
    assert_type(loader.stats(), dict[str, float])
    assert_type(loader.fingerprint(), str)
    state = loader.state_dict()
    assert_type(state, dict[str, Any])
    loader.load_state_dict(state)
    frozen: Mapping[str, Any] = state
    loader.load_state_dict(frozen)
    assert_type(iter(loader), Iterator[Any])
    assert_type(loader.epochs(3), Iterator[int])
    loader.set_epoch(3)

    assert_type(pardata.seed_everything(0, per_rank=True, deterministic=True), int)


def a_step(step: pardata.Microbatches[Tensor]) -> None:
    for batch in step:
        assert_type(batch, Tensor)
    assert_type(step[0], Tensor)
    assert_type(step[:2], Sequence[Tensor])
    assert_type(len(step), int)
    assert_type(step.epoch, int)
    assert_type(step.numbers, range)
    assert_type(step.counts, tuple[int, ...])
    step[0] = torch.ones(1)  # type: ignore[index]  # pyright: ignore[reportIndexIssue]  # only to be read


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Stand for a user's loss."""
    raise NotImplementedError


def loss_and_accuracy(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Stand for a user's loss and metrics."""
    raise NotImplementedError


def terms_and_mean(model: nn.Module, batch: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Stand for a user's loss of several terms, and a metric with a denominator."""
    raise NotImplementedError


def weights_of_terms(batch: Tensor) -> dict[str, Tensor | float]:
    """Stand for a user's count of several terms."""
    raise NotImplementedError


def the_gradient(step: pardata.Microbatches[Tensor]) -> None:
    assert_type(pardata.backward(Net(), mean_loss, step), Tensor)
    assert_type(pardata.backward(Net(), mean_loss, torch.ones(1), count=len), Tensor)
    assert_type(pardata.backward(Net(), loss_and_accuracy, step), tuple[Tensor, dict[str, float]])
    assert_type(pardata.backward(Net(), mean_loss, step, count=lambda batch: batch.sum()), Tensor)
    found = pardata.backward(Net(), terms_and_mean, step, count=weights_of_terms)
    assert_type(found, tuple[Tensor, dict[str, Any]])
    assert_type(pardata.Mean(torch.ones(3), 4).total, Tensor | float)


def across_ranks() -> None:
    loss = torch.tensor(0.5)
    metrics: dict[str, Tensor] = {"loss": loss}
    assert_type(pardata.all_reduce_mean(loss), Tensor)
    assert_type(pardata.all_reduce_mean(0.5, weight=8), float)
    assert_type(pardata.all_reduce_mean(metrics, weight=torch.tensor(8)), dict[str, Tensor])
    assert_type(pardata.all_reduce_mean((loss, 0.5), 0.0), tuple[Tensor, float])
    assert_type(pardata.all_reduce_sum(3), int)
    assert_type(pardata.all_reduce_sum(metrics), dict[str, Tensor])
    assert_type(pardata.all_reduce_max(0.5), float)
    assert_type(pardata.all_reduce_min((0.5, loss)), tuple[float, Tensor])
    assert_type(pardata.broadcast("text"), str)
    assert_type(pardata.broadcast({"order": loss}), dict[str, Tensor])
    assert_type(pardata.all_gather(["a"]), list[list[str]])
    assert_type(pardata.all_gather((loss, 0.5)), list[tuple[Tensor, float]])


def what_a_run_leaves_behind(loader: pardata.Loader, loss: Tensor) -> None:
    log = pardata.get_logger("train")
    assert_type(log, pardata.RankLogger)
    log.info("epoch %d", 1, ranks="all", once=True)

    bar = pardata.progress(["a", "b"], "reading", total=2, batch_size=1)
    assert_type(bar, pardata.Progress[str])
    bar.show(loss=loss, name="a")
    for item in bar:
        assert_type(item, str)
    for batch in pardata.progress(loader):
        assert_type(batch, Any)
    assert_type(list(pardata.progress(range(3))), list[int])

    with pardata.MetricWriter("runs") as writer:
        assert_type(writer, pardata.MetricWriter)
        writer.write(1, {"loss": loss, "accuracy": 0.5})
        writer.close()

    with pardata.Checkpointer(Path("runs"), keep=2, keep_best="-loss", asynchronous=True) as saver:
        assert_type(saver, pardata.Checkpointer)
        saver.save(1, model=nn.Linear(2, 2), loader=loader, best=0.5, history=[1.0])
        restored = saver.restore(model=nn.Linear(2, 2), at=saver.steps()[-1])
        saver.restore(at="best")
        saver.restore(at="worst")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # one of several
        assert_type(restored, pardata.Restored)
        assert_type(restored.step, int)
        assert_type(restored.values, dict[str, Any])
        saver.wait()
    with pardata.StopSignal() as stop:
        assert_type(stop, pardata.StopSignal)
        assert_type(stop.agreed(), bool)
        assert_type(stop.requested, bool)
    pardata.StopSignal(signal.SIGTERM, 12)


def train(steps: int) -> Iterator[nn.Module]:
    """Stand for a training function."""
    raise NotImplementedError


def losses() -> Iterator[dict[str, float | Tensor]]:
    """Yield something else than a model."""
    raise NotImplementedError


def for_tests() -> None:
    assert_type(run(download, "https://example.org", 3), list[Path])
    run(download, "https://example.org", 3, world_size=3, timeout=10.0, env={"A": "1"})
    assert_type(run(pardata.world), list[pardata.World])
    assert_same_at_every_world_size(train, 3)
    assert_same_at_every_world_size(train, 3, sizes=[1, 4], rtol=1e-5, atol=0, timeout=10)
    assert_same_at_every_world_size(losses)
    assert_same_at_every_world_size(train, "3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # an int

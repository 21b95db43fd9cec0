"""make_loader: builds a Loader from its arguments."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Unpack

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from pardata._validation import plain_number
from pardata.data._config import LoaderConfig, ResolvedConfig, resolve
from pardata.data._device_prefetch import DeviceTransfer
from pardata.data._fetcher import Collator, MapFetcher
from pardata.data._held_objects import held_generators
from pardata.data._iterable_fetcher import IterableFetcher, LockstepSource
from pardata.data._loader import Loader, Parts
from pardata.data._loader_state import StateSchema
from pardata.data._sampler import GlobalBatchSampler
from pardata.data._step_source import DataLoaderOptions, StepSource
from pardata.environment._logger import get_logger
from pardata.rng._seeds import default_seed

_log = get_logger(__name__)


def make_loader(
    dataset: Dataset[Any],
    batch_size: int | None = None,
    *,
    distributed: bool | Literal["auto"] = "auto",
    shuffle: bool = False,
    drop_last: bool | None = None,
    microbatch_size: int | None = None,
    sampler: Sampler[Any] | None = None,
    batch_sampler: Iterable[Sequence[Any]] | None = None,
    cost: Iterable[Any] | Callable[[int], float] | None = None,
    sharded: bool = False,
    num_workers: int | Literal["auto"] = "auto",
    seed: int | None = None,
    reproducible: bool = True,
    device: torch.device | str | None = "auto",
    batch_transform: Callable[[Any], Any] | None = None,
    prefetch: int = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **options: Unpack[DataLoaderOptions],
) -> Loader:
    """Return a loader of this rank's part of each *global* batch of `batch_size` samples.

    Step k of an epoch has the same samples at every world size. Each rank gets consecutive samples
    of it, its local batch. The sizes of local batches differ by at most one. The loader collates as
    ``DataLoader`` does, and moves each batch to the device. All ranks yield the same number of
    batches. No sample is repeated. Without `shuffle` no sample is left out, so an evaluation counts
    each exactly once. If then the last batch has fewer samples than ranks, some ranks get an empty
    one. Epochs advance by themselves, and ``state_dict()`` resumes at any
    step and any world size.

    The loader reads by whole batches, without workers, if the dataset is a ``TensorDataset``, what
    `cache_dataset` returns, or a ``Subset`` of such. If another dataset has ``__getitems__``, the
    loader reads each batch by one call of that. It collates a list of samples, and takes a tensor,
    tuple or dict as the batch itself.

    Collective: every rank must call it, unless ``distributed=False``. Iterating is collective in
    two cases. Ranks compare the order of a `sampler` at the start of each epoch, and agree on the
    start and the end of an ``IterableDataset``. In a single process it is a ``DataLoader`` with
    epochs.

    Args:
        dataset: map-style, with ``__getitem__`` and ``__len__``, or an ``IterableDataset``. Every
            rank reads an ``IterableDataset`` to its end, in one worker at most, and keeps its local
            batches (but see `sharded`). The loader calls its ``set_epoch``, if it has one, in
            each process that reads it.
        batch_size: samples of one optimizer step, over all ranks. Required, unless there is a
            `batch_sampler`.
        distributed: ``"auto"`` divides the samples among the ranks. ``True`` requires a launcher.
            ``False`` gives this process all samples.
        shuffle: take a new order in each epoch. It depends only on `seed` and the epoch, and
            takes constant memory.
        drop_last: drop an incomplete last global batch. ``None`` drops it with `shuffle`, because
            that is training, and keeps it otherwise.
        microbatch_size: cut each step into consecutive microbatches of this many samples, at every
            world size. Each rank gets consecutive microbatches, as `Microbatches`.
        sampler: yields the order of the whole epoch, the same on every rank, in place of `shuffle`.
            It draws under a separate seed, after its ``set_epoch`` if it has one. Its length may
            change between epochs. A sample that it repeats gets other random numbers.
        batch_sampler: yields the *global* batches of the whole epoch, lists of indices that are the
            same on every rank. It replaces `batch_size`, `shuffle`, `sampler` and `drop_last`, and
            draws as a `sampler` does. Without `microbatch_size` each batch must have a sample for
            every rank.
        cost: the cost to train each sample: numbers ≥ 0 of shape (len(dataset),), such as
            a list of lengths, or a function of an index. It is called for all indices at once. The
            ranks get consecutive microbatches of about equal cost, not of equal number; without
            `microbatch_size`, samples. The largest local batch then costs as little as possible.
            Each rank gets at least one microbatch if there are enough. Batches, order,
            microbatches, seeds and metrics are those without `cost`. For a `Mixture` it has a
            number for each sample of its datasets, one dataset after the other.
        sharded: the ``IterableDataset`` yields, on each rank and worker, samples that no other
            yields. Each rank batches them in the order in which they come. The epoch ends when all
            ranks have run out, and a rank that ran out before gets empty batches. With `drop_last`
            it ends as soon as one rank cannot fill its local batch. ``get_worker_info()`` has the
            number of the worker. Take the rank from `world` when you make the dataset.
        num_workers: per rank. ``"auto"`` is 0 for a dataset that is read by whole batches.
            Otherwise it is the number of cores that this rank may use, less one, at most 8.
        seed: of the order, the samples and the workers. ``None`` is rank 0's
            ``torch.initial_seed()`` for the first loader that a run makes. Each further one gets a
            seed made of that and of its number, which no other loader of the run has.
            `seed_everything` starts the numbering anew.
        reproducible: seed the default generators of Python, NumPy and PyTorch before each sample,
            from `seed`, the epoch and the sample. After each batch they are put back. An
            augmentation that draws from these generators depends neither on the workers nor on the
            world size. An ``IterableDataset`` is always seeded before each batch instead.
            `collate_fn`, `batch_transform` and ``__getitems__`` are seeded for each microbatch.
            Without `microbatch_size` it is an error if the first two draw in the first 16 steps
            of an epoch, or in each sixteenth after them. If ``__getitems__`` draws, the loader
            reads one by one, by ``__getitem__``.
        device: where the batches go. ``"auto"`` is the world's device; ``None`` leaves them on the
            CPU.
        batch_transform: applied to each batch, or microbatch, on the device.
        prefetch: on a GPU, how many batches are copied and transformed ahead of the loop, on a
            separate stream. 0 is none.
        collate_fn: as in ``DataLoader``. A StopIteration in any function that you pass is an error.
            Samples that are None count nothing: it must leave them out.
        options: for the ``DataLoader``: `pin_memory`, `timeout`, `worker_init_fn`,
            `multiprocessing_context`, `prefetch_factor` and `persistent_workers`. By default
            batches that go to a GPU are pinned, and each epoch starts new workers, which read the
            dataset as it is then. Persistent workers keep the dataset of the first epoch. They are
            the default for an iterable dataset with a ``state_dict``.

    Raises:
        TypeError: the dataset cannot be indexed, or a size is no integer.
        ValueError: the batch size is not positive, smaller than the world, or larger than a dataset
            whose incomplete batches are dropped. Or `shuffle` comes with a `sampler`, or either of
            them or a batch size with a `batch_sampler`. Or a shuffled last batch has fewer samples
            than ranks.
        RuntimeError: ranks disagree on the arguments, or on the indices and file names that the
            dataset lists; the error has a table. Or no group was joined. All errors come on every
            rank.

    >>> data = torch.utils.data.TensorDataset(torch.arange(5))
    >>> [batch.tolist() for (batch,) in make_loader(data, batch_size=2)]
    [[0, 1], [2, 3], [4]]
    """
    settings = resolve(LoaderConfig(**{n: plain_number(x) for n, x in locals().items()}))
    return Loader(settings.plan, _parts(settings), partial(_with_seed, settings))


def _parts(settings: ResolvedConfig) -> Parts:
    """Return the parts of a loader for resolved arguments."""
    given, ranks, plan, workers = settings.given, settings.ranks, settings.plan, settings.workers
    seeding = settings.seed, given.reproducible, given.microbatch_size is not None
    collation = Collator(given.collate_fn, *seeding, settings.world.rank)
    for name in ("dataset", "collate_fn", "batch_transform") if given.reproducible else ():
        for path in held_generators(name, getattr(given, name)):
            text = "the loader cannot seed `%s`: use default generators, or pass reproducible=False"
            _log.warning(text, path, ranks=[0], once=True)
    if not isinstance(given.dataset, IterableDataset):
        sampler = given.sampler if given.batch_sampler is None else given.batch_sampler
        to_workers = workers["num_workers"] > 0
        orders = settings.seed, given.shuffle, sampler, given.dataset
        order = GlobalBatchSampler(plan, ranks, *orders, to_workers)
        source = StepSource(MapFetcher(given.dataset, collation), order, ranks, workers)
    else:
        stream = IterableFetcher(given.dataset, collation, plan, sharded=given.sharded)
        source = LockstepSource(stream, None, ranks, workers)
    places = settings.device, given.batch_transform, collation, given.prefetch, settings.pins
    return _schema(settings), source, DeviceTransfer(*places)


def _with_seed(settings: ResolvedConfig, seed: Any) -> Parts | None:
    """Return the parts with the default seed of another loader of this run, else None."""
    initial = settings.initial
    if initial is None or all(default_seed(initial, number) != seed for number in range(1000)):
        return None
    return _parts(replace(settings, seed=seed))


def _schema(settings: ResolvedConfig) -> StateSchema:
    given, plan = settings.given, settings.plan
    facts: dict[str, Any] = {"length": plan.length, "batch_size": given.batch_size}
    facts |= {"microbatch_size": given.microbatch_size, "shuffle": given.shuffle}
    facts |= {"drop_last": plan.drop_last, "seed": settings.seed, "samples": settings.listed}
    for name in ("sampler", "batch_sampler"):
        facts[name] = None
        if (drawn_by := getattr(given, name)) is not None:
            # Without the length, which may differ between epochs. The ranks compare the order.
            facts |= {name: type(drawn_by).__name__, "length": None}
    shards = f"{plan.size} ranks with {settings.workers['num_workers']} workers"
    facts["shards"] = shards if given.sharded else None
    return StateSchema(facts, isinstance(given.dataset, IterableDataset))

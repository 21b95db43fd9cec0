"""Bad inputs to what reads data: each an error on every rank, with cause and cure."""

import itertools
import tempfile

import torch
from misuse import MANY, case
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from pardata import cache_dataset, make_loader

TEN = TensorDataset(torch.arange(10))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Broken(Dataset):
    """The seventh of its ten samples cannot be read."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 7:
            message = "the file is truncated"
            raise OSError(message)
        return index


class NoLength(Dataset):
    def __getitem__(self, index):
        return index


class OfItself(NoLength):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


class Longer:
    """A sampler that yields more than it says."""

    def __len__(self):
        return 5

    def __iter__(self):
        return iter(range(9))


class Endless(Longer):
    """A sampler that never ends."""

    def __iter__(self):
        return itertools.repeat(0)


def go_on(**changes):
    """Let a loader of a stream of ten go on from its state, with some keys changed."""
    loader = make_loader(Stream(), 5, seed=1, num_workers=0)
    loader.load_state_dict({**loader.state_dict(), **changes})
    list(loader)


def own_generator():
    return RandomSampler(TEN, generator=torch.Generator().manual_seed(0))


def load(**changes):
    """Load the state of a loader that stands at the beginning, with some keys changed."""
    loader = make_loader(TEN, 4, seed=1)
    state = {**loader.state_dict(), **changes}
    loader.load_state_dict({key: value for key, value in state.items() if value != "none"})


def cache(dataset, **options):
    with tempfile.TemporaryDirectory() as directory:
        cache_dataset(dataset, directory, **options)


def epoch_of(*args, **options):
    return list(make_loader(*args, **options))


CASES = {
    "make_loader": [
        case("make_loader(TEN, 0)", "ValueError", "`batch_size` must be an integer of at least",
             "but is 0: pass a whole number from"),
        case("make_loader(TEN, -4)", "ValueError", "`batch_size` must be an integer of at least",
             "but is -4"),
        case("make_loader(TEN, 2.5)", "TypeError", "`batch_size` must be an integer of at least",
             "but is 2.5"),
        case("make_loader(TEN, '4')", "TypeError", "`batch_size` must be an integer of at least",
             "but is '4'"),
        case("make_loader(TEN, True)", "TypeError", "must be an integer", "but is True"),
        case("make_loader(TEN, None)", "TypeError", "must be an integer", "but is None"),
        case("make_loader(TEN, 4 if rank == 0 else 0)", "ValueError",
             "one for each rank, as it counts the samples of all ranks", "but is 0", sizes=MANY),
        case("make_loader(TEN, 1)", "ValueError",
             "one for each rank, as it counts the samples of all ranks", "but is 1", sizes=MANY),
        case("make_loader(TEN, 4 + 2 * rank)", "RuntimeError", "pass the same to `make_loader`",
             "`batch_size` differs", "rank 1:", sizes=MANY),
        case("make_loader(TEN, 11, shuffle=True)", "ValueError",
             "at most the 10 samples of the dataset", "is 11", "drop_last=False"),
        case("make_loader(TEN, 3, shuffle=True, drop_last=False)", "ValueError",
             "the last batch must have a sample for each of the", "drop_last=True", sizes=MANY),
        case("make_loader(TEN, 10**30, drop_last=True)", "ValueError", "at most the 10 samples"),
        case("make_loader(object(), 4)", "TypeError", "__getitem__ and __len__, or be an "
             "IterableDataset, but object has not"),
        case("make_loader(None, 4)", "TypeError", "__getitem__ and __len__", "NoneType has not"),
        case("make_loader(iter([1, 2]), 4)", "TypeError", "or be an IterableDataset",
             "list_iterator has not"),
        case("make_loader({1, 2}, 4)", "TypeError", "set has not", "map-style"),
        case("make_loader(TensorDataset, 4)", "TypeError", "`dataset` must be a dataset, but is "
             "the class TensorDataset: pass an object"),
        case("make_loader(NoLength(), 4)", "TypeError", "`dataset`", "NoLength has not",
             label="a map-style dataset without `__len__`"),
        case("make_loader(OfItself(2.5), 4)", "TypeError", "`dataset` must know its length, but "
             "len() of OfItself failed", "let its __len__ return a whole number", ours=False,
             label="a dataset whose `__len__` returns 2.5"),
        case("make_loader(OfItself(-1), 4)", "ValueError", "should return >= 0", ours=False,
             label="a dataset whose `__len__` returns -1"),
        case("make_loader(OfItself(10 - rank), 4)", "RuntimeError",
             "every rank must pass the same to `make_loader`, but `the length` differs",
             "rank 1: the length=9", sizes=MANY, label="a dataset that is shorter on one rank"),
        case("epoch_of(Broken(), 10, num_workers=0)", "RuntimeError",
             "sample 7 could not be read on rank 0", "the file is truncated", sizes=(1,),
             label="an error in `__getitem__`"),
        case("epoch_of(Broken(), 10, num_workers=0)", "RuntimeError",
             "sample 7 could not be read on rank 2", "the file is truncated", sizes=(3,),
             ranks=(2,), label="an error in `__getitem__`"),
        case("make_loader(Stream(), 4, shuffle=True)", "ValueError",
             "`sampler` and `batch_sampler` must be left out for an IterableDataset", "Stream"),
        case("make_loader(Stream(), 4, sampler=RandomSampler(TEN))", "ValueError",
             "`sampler` and `batch_sampler` must be left out for an IterableDataset"),
        case("make_loader(TEN, 4, sampler=RandomSampler(TEN), shuffle=True)", "ValueError",
             "`shuffle` must be False with a `sampler`", "choose one"),
        case("make_loader(TEN, 4, sampler=DistributedSampler(TEN, 1, 0))", "ValueError",
             "`sampler` must yield the order of the whole dataset", "pass shuffle=True"),
        case("make_loader(TEN, 4, sampler=BatchSampler(TEN, 2, False))", "ValueError",
             "`sampler` must yield single indices, but is a BatchSampler", "as `batch_sampler`"),
        case("make_loader(TEN)", "TypeError", "`batch_size` must be an integer", "but is None"),
        case("make_loader(DataLoader(TEN, 2), 4)", "TypeError", "but is a DataLoader: pass "
             "loader.dataset, and its batch_size times the number of ranks"),
        case("make_loader(TEN, 4, batch_sampler=[[0, 1, 2]])", "ValueError",
             "`batch_sampler` must come without `batch_size`", "leave `batch_size` out"),
        case("make_loader(TEN, shuffle=True, drop_last=False, batch_sampler=[[0, 1, 2]])",
             "ValueError", "leave `shuffle` and `drop_last` out"),
        case("make_loader(TEN, batch_sampler=[[0, 1, 2]], sampler=RandomSampler(TEN))",
             "ValueError", "must come without `sampler`, as it yields whole batches"),
        case("make_loader(Stream(), batch_sampler=[[0, 1, 2]])", "ValueError",
             "`sampler` and `batch_sampler` must be left out for an IterableDataset"),
        case("epoch_of(TEN, batch_sampler=[0, 1])", "TypeError", "`batch_sampler` must yield lists "
             "of indices", "yielded 0: pass what yields single ones as `sampler`"),
        case("epoch_of(TEN, batch_sampler=[[1, 2, 3], [4]])", "ValueError", "`batch_sampler` must "
             "yield at least 3 indices for each global batch", "[4]: let it join", sizes=(3,)),
        case("epoch_of(TEN, batch_sampler=[[]], microbatch_size=1)", "ValueError",
             "must yield at least 1 indices", "but yielded []"),
        case("epoch_of(TEN, batch_sampler=[[rank] * 3])", "RuntimeError", "every rank must pass "
             "the same to `make_loader(batch_sampler=…)`, but `the order` differs", sizes=MANY),
        case("make_loader(TEN, 4, sampler=iter([1]))", "TypeError", "`sampler` must have a length"),
        case("epoch_of(TEN, 4, sampler=Longer())", "ValueError",
             "`sampler` must yield as many indices as its length",
             label="a sampler that yields more than its length"),
        case("epoch_of(TEN, 4, sampler=Endless())", "ValueError", "`sampler` must yield as many "
             "indices as its length, 5, but yielded more", label="a sampler that never ends"),
        case("epoch_of(TEN, 4, sampler=own_generator())", "ValueError",
             "`sampler` must yield the same order whenever it is asked", "RandomSampler yielded "
             "another for epoch 0", "(generator=None)",
             label="a sampler with a generator of its own"),
        case("epoch_of(TEN, 3, sampler=[0, 1, 99])", "RuntimeError", "99] could not be read",
             "IndexError", sizes=(1,), ours=False),
        case("epoch_of(TEN, 4, sampler=[rank] * 10)", "RuntimeError", "every rank must pass the "
             "same to `make_loader(sampler=…)`, but `the order` differs", sizes=MANY),
        case("make_loader(TEN, 4, sharded=True)", "ValueError", "`sharded` must be False for a "
             "dataset that has indices", "leave it out"),
        case("make_loader(Stream(), 4, sharded=True, microbatch_size=2)", "ValueError",
             "`microbatch_size` must be left out with `sharded`", "choose one"),
        case("make_loader(TEN, 4, shuffle='no')", "TypeError",
             "`shuffle` must be True or False, but is 'no'"),
        case("make_loader(TEN, 4, drop_last='False')", "TypeError",
             "`drop_last` must be True or False, but is 'False'"),
        case("make_loader(TEN, 4, sharded=0)", "TypeError", "`sharded` must be True or False"),
        case("make_loader(TEN, 4, reproducible='no')", "TypeError",
             "`reproducible` must be True or False, but is 'no'"),
        case("make_loader(TEN, 4, distributed='yes')", "ValueError",
             "`distributed` must be True, False or 'auto', but is 'yes'"),
        case("make_loader(TEN, 4, microbatch_size=0)", "ValueError",
             "`microbatch_size` must be an integer of at least 1, but is 0"),
        case("make_loader(TEN, 4, microbatch_size=5 if rank == 0 else 2)", "ValueError",
             "`microbatch_size` must be at most the `batch_size` of 4", "is 5"),
        case("make_loader(TEN, 4, microbatch_size=1 + rank)", "RuntimeError",
             "`microbatch_size` differs", "rank 1:", sizes=MANY),
        case("make_loader(TEN, 4, reproducible=rank == 0)", "RuntimeError",
             "`reproducible` differs", "reproducible=False", sizes=MANY),
        case("make_loader(TEN, 4, prefetch=rank)", "RuntimeError", "`prefetch` differs",
             "rank 0: prefetch=0", sizes=MANY),
        case("make_loader(TEN, 4, drop_last=rank == 0)", "RuntimeError", "`drop_last` differs",
             "drop_last=False", sizes=MANY),
        case("make_loader(TEN, 4, seed=rank or None)", "RuntimeError", "`seed` differs",
             "rank 0: seed=None", sizes=MANY, label="a seed that only some ranks have"),
        case("make_loader(Stream() if rank else TEN, 4, sharded=rank > 0)", "RuntimeError",
             "`the length`, `sharded` differ", sizes=MANY),
        case("make_loader(TEN, 4, microbatch_size='2')", "TypeError",
             "`microbatch_size` must be an integer of at least 1, but is '2'"),
        case("make_loader(TEN, 4, prefetch=True)", "TypeError",
             "`prefetch` must be an integer of at least 0, but is True"),
        case("make_loader(TEN, 4, seed='0')", "TypeError",
             "`seed` must be an integer, but is '0'"),
        case("make_loader(TEN, 4, shuffle=True, seed=rank)", "RuntimeError", "`seed` differs",
             "rank 1: seed=1", sizes=MANY),
        case("make_loader(TEN, 4, shuffle=rank == 0)", "RuntimeError", "`shuffle`",
             "differ", sizes=MANY),
        case("make_loader(TEN, 4, num_workers=-1)", "ValueError",
             "`num_workers` must be an integer of at least 0 or 'auto', but is -1"),
        case("make_loader(TEN, 4, num_workers='many')", "TypeError",
             "`num_workers` must be an integer of at least 0 or 'auto', but is 'many'"),
        case("make_loader(TEN, 4, num_workers=0, prefetch_factor=2)", "ValueError",
             "prefetch_factor option could only be specified in multiprocessing", ours=False),
        case("make_loader(TEN, 4, timeout=-1)", "ValueError",
             "`timeout` must be a number of seconds from 0 up, but is -1"),
        case("make_loader(TEN, 4, timeout=-1 if rank == 0 else 0)", "ValueError",
             "`timeout` must be a number of seconds from 0 up, but is -1", sizes=MANY),
        case("make_loader(TEN, 4, num_workers=0, timeout=30)", "ValueError",
             "`timeout` must be 0 without workers", "leave it out, or pass `num_workers`"),
        case("make_loader(TEN, 4, num_workers=1, multiprocessing_context='thread')", "ValueError",
             "multiprocessing_context option should specify a valid start method", ours=False),
        case("make_loader(TEN, 4, prefetch=-1)", "ValueError",
             "`prefetch` must be an integer of at least 0, but is -1"),
        case("make_loader(TEN, 4, device='gpu')", "RuntimeError",
             "`device` must be one that this machine has, but is 'gpu'", ours=False),
        case("make_loader(TEN, 4, device='cuda:99')", "RuntimeError",
             "`device` must be one that this machine has, but is 'cuda:99'", ours=False),
        case("make_loader(TEN, 4, device='cpu' if rank == 0 else 'gpu')", "RuntimeError",
             "`device` must be one that this machine has, but is 'gpu'", sizes=MANY, ours=False),
        case("make_loader(TEN, 4, collate_fn=5)", "TypeError",
             "`collate_fn` must be a function, but is 5"),
        case("make_loader(TEN, 4, batch_transform='flip')", "TypeError",
             "`batch_transform` must be a function, but is 'flip'"),
        case("make_loader(TEN, 4, worker_init_fn=[print] if rank else None)", "TypeError",
             "`worker_init_fn` must be a function", sizes=MANY, ours=False),
        case("epoch_of(TEN, 4, collate_fn=lambda samples: torch.rand(len(samples)))",
             "RuntimeError", "`collate_fn` must draw no", "microbatch_size", "reproducible=False"),
        case("make_loader(TEN, 4, foo=1)", "TypeError", "unexpected keyword argument 'foo'",
             ours=False),
    ],
    "Loader": [
        case("make_loader(TEN, 4).set_epoch(-1)", "ValueError",
             "`epoch` must be an integer of at least 0, but is -1"),
        case("make_loader(TEN, 4).set_epoch('1')", "TypeError",
             "`epoch` must be an integer of at least 0, but is '1'"),
        case("make_loader(TEN, 4).epochs(-1)", "ValueError",
             "`count` must be an integer of at least 0, but is -1"),
        case("make_loader(TEN, 4).epochs('3')", "TypeError", "`count` must be an integer", "'3'"),
        case("len(make_loader(Stream(), 4))", "TypeError", "Stream has none", "__len__"),
        case("make_loader(Stream(), 4).fingerprint()", "TypeError", "the samples must have indices",
             "hash what you get"),
        case("make_loader(TEN, 4).load_state_dict(None)", "ValueError",
             "the state_dict() of a loader returned, of version 1, but is None"),
        case("make_loader(TEN, 4).load_state_dict({'model': 1})", "ValueError",
             "`state` must be what the state_dict() of a loader returned"),
        case("load(seed='none')", "ValueError", "`state` must be what the state_dict() of a "
             "loader returned", label="a state from which a key is gone"),
        case("load(version=2)", "ValueError", "returned, of version 1, but is", "version 2: look",
             "the release of pardata that saved it"),
        case("load(seed=2)", "ValueError", "the same dataset and arguments, but seed was 2 and "
             "is 1", "make the loader as it was"),
        case("load(length=11)", "ValueError", "length was 11 and is 10"),
        case("load(batch_size=5)", "ValueError", "batch_size was 5 and is 4"),
        case("load(shuffle=True)", "ValueError", "shuffle was True and is False"),
        case("load(delivered=5)", "ValueError", "`state` must be at the end of a batch of 4, but "
             "is at sample 5 of epoch 0"),
        case("load(delivered=12)", "ValueError", "is at sample 12 of epoch 0"),
        case("go_on(delivered=7)", "ValueError", "`state` must be of this iterable dataset, but "
             "its `delivered` is 7 samples, and it continues there, in the middle of a batch of 5",
             label="an iterable dataset longer than the state says"),
        case("go_on(delivered=100)", "ValueError", "`delivered` is 100 samples, and it ended after "
             "10", label="an iterable dataset shorter than the state says"),
        case("go_on(delivered=5, digest='other')", "ValueError", "`dataset` must yield the same "
             "samples when an epoch is read again", "Stream begins with others: let it draw",
             label="an iterable dataset with randomness of its own, resumed"),
        case("load(epoch=-1)", "ValueError", "is at sample 0 of epoch -1"),
        case("load(epoch=2**63)", "ValueError", "of epoch 9223372036854775808"),
    ],
    "cache_dataset": [
        case("cache(Stream())", "TypeError", "`dataset` must have __getitem__ and __len__ to be "
             "cached, but Stream has not", "map-style"),
        case("cache_dataset(TensorDataset)", "TypeError", "`dataset` must be a dataset, but is "
             "the class TensorDataset: pass an object"),
        case("cache([])", "ValueError", "`dataset` must have at least one sample to be cached"),
        case("cache(['text'])", "TypeError", "sample 0 cannot be stored"),
        case("cache([torch.zeros(2), torch.zeros(3)])", "ValueError", "sample 1 cannot be stored"),
        case("cache(Broken())", "RuntimeError", "sample 7 could not be read: OSError: the file is "
             "truncated"),
        case("cache(TEN, num_workers=-1)", "ValueError", "`num_workers` must be an integer of "
             "at least 0 or 'auto', but is -1"),
        case("cache_dataset(TEN, Path(__file__))", "FileExistsError", "File exists",
             ours=False, label="`cache_dataset(data, a_file)`"),
        case("cache_dataset(TEN, 5)", "TypeError", "os.PathLike object", ours=False),
        case("cache(OfItself(10 - rank))", "RuntimeError", "the same to `cache_dataset`",
             "`the length` differs", sizes=MANY, label="a dataset that is shorter on one rank"),
    ],
}  # fmt: skip

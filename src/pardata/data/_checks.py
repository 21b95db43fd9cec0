"""What make_loader refuses, and what it says."""

from typing import Any

from torch.utils.data import DistributedSampler, IterableDataset

from pardata.ranks._arguments import check_no_class


def check_dataset(dataset: object, sampler: object, *, shuffle: bool, sharded: bool) -> None:
    """Raise where `dataset` cannot be read, or not in the order that is asked for."""
    if isinstance(dataset, IterableDataset):
        if shuffle or sampler is not None:
            msg = (
                f"`shuffle` and `sampler` must be left out for an IterableDataset, whose order is "
                f"its own, but are given for {type(dataset).__name__}: shuffle inside the data set"
            )
            raise ValueError(msg)
        return
    if sharded:
        msg = (
            f"`sharded` must be False for a data set that has indices, which are shared out here, "
            f"but is True for {type(dataset).__name__}: leave it out"
        )
        raise ValueError(msg)
    check_no_class(dataset)
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        msg = (
            f"`dataset` must have __getitem__ and __len__, or be an IterableDataset, but "
            f"{type(dataset).__name__} is neither: write a map-style data set, whose samples have "
            f"numbers that can be shared out"
        )
        raise TypeError(msg)
    if isinstance(sampler, DistributedSampler):
        msg = (
            "`sampler` must yield the order of the whole data set, but is a DistributedSampler, "
            "which yields one rank's part: leave it out and pass shuffle=True"
        )
        raise ValueError(msg)
    if sampler is not None and not hasattr(sampler, "__len__"):
        msg = (
            f"`sampler` must have a length, but {type(sampler).__name__} has none: give it __len__"
        )
        raise TypeError(msg)
    if sampler is not None and shuffle:
        msg = (
            "`shuffle` must be False with a `sampler`, which is the order, but is True: choose one"
        )
        raise ValueError(msg)


def length_of(dataset: Any, sampler: Any, *, sharded: bool) -> int | None:
    """Return the number of samples of an epoch; None where only its end tells.

    Raises:
        TypeError: for a data set or sampler that has indices and does not know how many.
    """
    if sharded:
        return None  # what a rank's part says of itself is not the length of the whole
    measured = dataset if sampler is None else sampler
    try:
        return len(measured)
    except (TypeError, NotImplementedError) as error:
        if isinstance(error, TypeError) and isinstance(dataset, IterableDataset):
            return None  # it may have none
        name = "dataset" if sampler is None else "sampler"
        msg = (
            f"`{name}` must know its length, but len() of {type(measured).__name__} failed: "
            f"{error}: let its __len__ return a whole number"
        )
        raise TypeError(msg) from error


def check_callables(**functions: object) -> None:
    """Raise for the first of `functions` that is neither None nor can be called."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            msg = f"`{name}` must be a function, but is {function!r}"
            raise TypeError(msg)


def check_sizes(
    batch_size: object, microbatch_size: object, length: int | None, size: int, *, drop_last: bool
) -> None:
    """Raise where the batch size does not go with the world or the data set."""
    _check_size("batch_size", batch_size, max(1, size if microbatch_size is None else 1))
    assert isinstance(batch_size, int)  # noqa: S101  # for the type checker
    if microbatch_size is not None:
        _check_size("microbatch_size", microbatch_size, 1)
        assert isinstance(microbatch_size, int)  # noqa: S101  # likewise
        if microbatch_size > batch_size:
            msg = (
                f"`microbatch_size` must be at most the `batch_size` of {batch_size}, of which it "
                f"is a piece, but is {microbatch_size}: make it smaller"
            )
            raise ValueError(msg)
    if length is not None and drop_last and batch_size > length:
        msg = (
            f"`batch_size` must be at most the {length} samples of the data set, as drop_last "
            f"would leave no batch, but is {batch_size}: make it smaller, or pass drop_last=False"
        )
        raise ValueError(msg)


def _check_size(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"`{name}` must be an integer, but is {value!r}"
        raise TypeError(msg)
    if value < least:
        one_each, cure = "", "pass 1 or more"
        if least > 1:
            one_each, cure = ", one a rank", "it counts the samples of all ranks together"
        msg = f"`{name}` must be at least {least}{one_each}, but is {value}: {cure}"
        raise ValueError(msg)


def check_training_shares(batch_size: int, length: int, size: int) -> None:
    """Raise where the last batch of a shuffled epoch leaves ranks without samples."""
    if 0 < length % batch_size < size:
        msg = (
            f"the last batch must have a sample for each of the {size} ranks, but has "
            f"{length % batch_size} of {length}: a rank without one would leave the others "
            f"waiting for its gradient; pass drop_last=True, `microbatch_size` or another "
            f"batch_size"
        )
        raise ValueError(msg)


def check_streaming(*, sharded: bool, microbatch_size: object) -> None:
    """Raise where microbatches are asked of streams of which each rank has its own."""
    if sharded and microbatch_size is not None:
        msg = (
            f"`microbatch_size` must be left out with `sharded`, as the steps of such streams "
            f"depend on the number of ranks, but is {microbatch_size!r}: choose one"
        )
        raise ValueError(msg)


def check_timeout(timeout: object, num_workers: object) -> None:
    """Raise where `timeout` is no number, or there is nobody to wait for."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        msg = f"`timeout` must be a number of seconds from 0 up, but is {timeout!r}"
        raise ValueError(msg)
    if timeout and num_workers == 0:
        msg = (
            f"`timeout` must be 0 without workers, for whose batches it waits, but is {timeout!r}: "
            f"leave it out, or pass `num_workers`"
        )
        raise ValueError(msg)


def check_numbers(seed: object, prefetch: object) -> None:
    """Raise where `seed` or `prefetch` is no number of its kind."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        msg = f"`seed` must be an integer or None, but is {seed!r}"
        raise TypeError(msg)
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        msg = f"`prefetch` must be an integer from 0 up, but is {prefetch!r}"
        raise ValueError(msg)

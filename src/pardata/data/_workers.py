"""The processes that load for a rank: how many, whether they can hand over, and their seeds."""

import os
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from typing import Any

import torch
from torch.utils.data import DataLoader

from pardata.data._batch import is_read_whole
from pardata.ranks._arguments import check_integer
from pardata.ranks._cores import usable_cores
from pardata.ranks._world import World
from pardata.seeds._mix import mix

_LONGEST_SOCKET = 107  # characters: `sun_path` of Linux's unix(7), without its last zero


def choose_workers(num_workers: Any, dataset: Any, here: World) -> int:
    """Return how many workers this rank gets, of which "auto" decides from data set and cores.

    Raises:
        TypeError, ValueError: for a number that is none or negative, and where workers could not
            hand over a tensor.
    """
    if num_workers == "auto":
        num_workers = 0 if is_read_whole(dataset) else min(8, usable_cores(here) - 1)
    check_integer("num_workers", num_workers, least=0, why=" or 'auto'")
    if num_workers:
        _check_they_can_send()
    return int(num_workers)


def _check_they_can_send() -> None:
    """Raise where a worker could not open the socket by which it hands over a tensor.

    The worker's thread would die of that unseen, and ``DataLoader`` wait for its batch for ever.
    """
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return  # macOS and Windows: no socket
    directory = get_temp_dir()
    longest = _LONGEST_SOCKET - len("/listener-12345678")  # as multiprocessing.connection names it
    if len(os.fsencode(directory)) > longest:
        msg = (
            f"the temporary directory must have a name of at most {longest} characters for "
            f"`num_workers` above 0, as a worker hands over by a socket in it, but is "
            f"{directory!r}: set TMPDIR to one with a shorter name, or pass num_workers=0"
        )
        raise ValueError(msg)


class Workers:
    """What reads for us, and pins: a ``DataLoader`` that asks `read` for each of `requests`."""

    def __init__(self, read: Any, requests: Any, seed: int, rank: int, **options: Any) -> None:
        self._seed, self._rank = seed, rank
        self.loader: DataLoader[Any] = DataLoader(
            read,
            batch_size=None,  # what is read of a step is a batch already
            sampler=requests,
            collate_fn=_as_it_is,
            generator=torch.Generator(),
            **options,
        )

    def begun(self, epoch: int) -> Iterator[Any]:
        """Return what they read of this epoch; they begin at once."""
        # From here it draws its workers' seed, and so leaves the user's generator be.
        self.loader.generator.manual_seed(mix(self._seed, epoch, self._rank))
        return iter(self.loader)


def _as_it_is(fetched: Any) -> Any:
    return fetched

"""How many workers a rank gets, and whether they can send."""

import multiprocessing
import os
from multiprocessing.connection import arbitrary_address
from pathlib import Path

import pytest
import torch
from on_ranks import run, run_caught
from torch.utils.data import TensorDataset

from pardata import make_loader, world
from pardata.data._workers import choose_workers
from pardata.ranks._machine import usable_cores

AUTO = [
    (4, range(4), 3),
    (9, range(4), 8),
    (100, range(4), 8),
    (1, range(4), 0),
    (4, TensorDataset(torch.ones(4)), 0),
]


@pytest.mark.parametrize(("cores", "dataset", "workers"), AUTO)
def test_auto_is_the_cores_less_one_and_none_for_whole_batches(
    monkeypatch, cores, dataset, workers
):
    # Asked below make_loader, as DataLoader warns of more workers than there are cores.
    monkeypatch.setattr("pardata.data._workers.usable_cores", lambda here: cores)
    assert choose_workers("auto", dataset, world()) == workers


def _auto_workers():
    workers = make_loader(range(4), 2)._source.workers
    return 0 if workers is None else workers.num_workers, usable_cores(world())


def test_ranks_of_one_node_share_its_cores():
    for workers, cores in run(_auto_workers, world_size=2):
        assert workers == min(8, cores - 1)
        assert cores <= max(1, len(os.sched_getaffinity(0)) // 2)


def _load_below(directory):
    # As if TMPDIR had been `directory` since the process began: multiprocessing asks only once.
    multiprocessing.current_process()._config["tempdir"] = directory
    return [batch.tolist() for batch in make_loader(range(4), 4, num_workers=1)]


def _directory_whose_sockets_have(length, below):
    room = len(arbitrary_address("AF_UNIX")) - len(multiprocessing.util.get_temp_dir())
    directory = below + "/" + "x" * (length - room - len(below) - 1)
    Path(directory).mkdir()
    return directory


@pytest.mark.skipif(
    torch.multiprocessing.get_sharing_strategy() != "file_descriptor", reason="opens no socket"
)
def test_workers_send_over_the_longest_socket_and_a_longer_one_is_refused_at_once(short_tmp):
    longest = _directory_whose_sockets_have(107, short_tmp)
    assert run(_load_below, longest, world_size=2) == [[[0, 1]], [[2, 3]]]
    longer = _directory_whose_sockets_have(108, short_tmp)
    for outcome in run_caught(_load_below, longer, world_size=2):
        assert str(outcome).startswith("ValueError: the temporary directory must have a name of at")
        assert "most 89 characters" in outcome.text
        assert "set TMPDIR to one with a shorter name" in outcome.text

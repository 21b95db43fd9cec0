"""What the rows of ``errors.md`` use that save and restore."""

import shutil
import tempfile
from contextlib import contextmanager

import torch
from misuse_models import Code, net

from pardata import Checkpointer, barrier, rank_zero_call, world

BEST = {"model": net(), "best": 0.5}


def adam():
    return torch.optim.Adam(net().parameters())


class Fickle:
    """What has a state that cannot be taken."""

    def state_dict(self):
        raise OSError("the file is truncated")

    def load_state_dict(self, state):
        """Never get here."""


@contextmanager
def checkpoints(**options):
    directory = rank_zero_call(tempfile.mkdtemp)
    try:
        yield Checkpointer(directory, **options)
    finally:
        barrier("all are done with the directory")
        if world().is_main:
            shutil.rmtree(directory)


def save(*args, **objects):
    with checkpoints() as own:
        own.save(*args, **objects)


def save_at(place, **options):
    """Save in a directory of this name below one that all ranks share."""
    with checkpoints() as own:
        Checkpointer(own._directory / place, **options).save(1)


def save_best(value):
    with checkpoints() as own:
        Checkpointer(own._directory, keep_best="-best").save(1, best=value)


def restore_in(place):
    """Restore from a place beside or in a directory `first` that has a checkpoint."""
    with checkpoints() as own:
        Checkpointer(own._directory / "first").save(1)
        Checkpointer(own._directory / place).restore()


def restore(*unnamed, **objects):
    """Restore from a checkpoint of `BEST`."""
    with checkpoints() as own:
        own.save(1, **BEST)
        own.restore(*unnamed, **objects)


def spoil(change):
    """Restore from a directory whose only checkpoint was changed."""
    with checkpoints() as own:
        own.save(1, **BEST)
        if world().is_main:
            change(next(own._directory.glob("attempt-*-step-*")))
        barrier("it is spoilt")
        own.restore(model=net())


def truncate(checkpoint):
    file = checkpoint / "state.pt"
    file.write_bytes(file.read_bytes()[:-1])


def exchange_for_code(checkpoint):
    torch.save(Code(), checkpoint / "state.pt")


def save_in_turn():
    """Save in one directory by two runs in turn."""
    with checkpoints() as own:
        own.save(1)
        Checkpointer(own._directory).save(2)
        own.save(3)


LABELS = {
    "saving where another run has begun to save": "save_in_turn()",
    "restoring from a checkpoint's own folder": "restore_in('first/attempt-0001-step-000000001')",
    "restoring where the only checkpoint is truncated": "spoil(truncate)",
    "restoring where the only checkpoint was exchanged for code": "spoil(exchange_for_code)",
}

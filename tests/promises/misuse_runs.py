"""Bad inputs to what stops a run, saves it and restores it: errors on every rank."""

import shutil
import tempfile
from contextlib import contextmanager

import torch
from misuse import MANY, case
from torch import nn

from pardata import Checkpointer, barrier, rank_zero_call, world

BEST = {"model": nn.Linear(2, 1), "best": 0.5}


def net(width=1):
    return nn.Linear(2, width)


def adam():
    return torch.optim.Adam(net().parameters())


class Code:
    """Pickled, it is a call."""

    def __reduce__(self):
        return print, ("this must never be printed",)


class Fickle:
    """What has a state that cannot be taken."""

    def state_dict(self):
        message = "the file is truncated"
        raise OSError(message)

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


def restore_in(place, **options):
    """Restore from a place beside or in a directory `first` that has a checkpoint."""
    with checkpoints() as own:
        first = own._directory / "first"
        Checkpointer(first).save(1)
        Checkpointer(own._directory / place.format(first.name)).restore(**options)


def restore(*unnamed, **objects):
    """Restore from a checkpoint of `BEST`."""
    with checkpoints() as own:
        own.save(1, **BEST)
        own.restore(*unnamed, **objects)


def export(saved, name="weights.pt", **options):
    with checkpoints() as own:
        if saved:
            own.save(1, **saved)
        own.export(own._directory / name, **options)


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


def save_twice(second):
    """Save in one directory by two runs in turn."""
    with checkpoints() as own:
        own.save(1)
        Checkpointer(own._directory).save(2)
        own.save(second)


CASES = {
    "Checkpointer": [
        case("Checkpointer(5)", "TypeError", "os.PathLike", ours=False),
        case("Checkpointer('run', keep=0)", "ValueError",
             "`keep` must be an integer of at least 1, but is 0: pass a whole number from 1 up"),
        case("Checkpointer('run', keep=None)", "TypeError",
             "`keep` must be an integer of at least 1, but is None: pass a whole number"),
        case("Checkpointer('run', keep=True)", "TypeError",
             "`keep` must be an integer of at least 1, but is True: pass a whole number"),
        case("Checkpointer('run', keep_every=-1)", "ValueError",
             "`keep_every` must be an integer of at least 1, but is -1: pass a whole number"),
        case("Checkpointer('run', keep_every='10')", "TypeError",
             "`keep_every` must be an integer of at least 1, but is '10': pass a whole number"),
        case("Checkpointer('run', keep_best=3)", "TypeError", "`keep_best` must name a value that "
             "is saved, but is 3: pass a text, as 'accuracy', or '-loss' where less is better"),
        case("Checkpointer('run', keep_best='-')", "TypeError", "`keep_best` must name a value",
             "but is '-'"),
        case("save_at('run', keep_best='loss')", "TypeError", "`loss` must be saved each time, as "
             "a number, for `keep_best` goes by it, but is missing: pass float(…), or None where "
             "it is not known"),
        case("save_best(torch.ones(1))", "TypeError", "`best` must be saved each time, as a "
             "number", "but is tensor([1.])"),
        case("save_best(True)", "TypeError", "`best` must be saved each time, as a number",
             "but is True"),
        case("Checkpointer('run', asynchronous='no')", "TypeError",
             "`asynchronous` must be True or False, but is 'no'"),
        case("save(-1)", "ValueError",
             "`step` must be an integer of at least 0, but is -1: pass a whole number from 0 up"),
        case("save(1.0)", "TypeError",
             "`step` must be an integer of at least 0, but is 1.0: pass a whole number"),
        case("save('10')", "TypeError",
             "`step` must be an integer of at least 0, but is '10': pass a whole number"),
        case("save(model=net())", "TypeError", "missing 1 required positional argument: 'step'",
             ours=False),
        case("save(1, net())", "TypeError", "`objects` must be named, but a Linear is not: "
             "call save(step, model=model)"),
        case("save(rank)", "RuntimeError", "every rank must pass the same to `Checkpointer.save`",
             "`step` differs", "rank 1: step=1", sizes=MANY),
        case("save(1, **({'best': 1} if rank == 0 else {'last': 1}))", "RuntimeError",
             "every rank must pass the same", "`objects` differs", "['best']", "['last']",
             sizes=MANY),
        case("save(1, best=rank)", "RuntimeError", "every rank must pass the same", "best",
             "`all_gather` collects", sizes=MANY),
        case("save_at(f'run{rank}')", "RuntimeError", "`directory` differs", "run0", "run1",
             "`rank_zero_call` gives all the name of a directory", sizes=MANY, ours=False),
        case("save_at('run', keep=1 + rank)", "RuntimeError", "`keep` differs", "rank 1: keep=2",
             sizes=MANY),
        case("save_at('run', asynchronous=rank == 0)", "RuntimeError", "`asynchronous` differs",
             sizes=MANY),
        case("save(1, loss=lambda x: x)", "TypeError", "what is saved must be tensors, numbers, "
             "strings", "but `loss` is", "convert it, or leave it out", ours=False),
        case("save(1, history=[1, {'a': Code()}])", "TypeError", "but `history[1]['a']` is",
             "it would have to run code when it is loaded", ours=False),
        case("save(1, best=Code() if rank == 0 else 1)", "TypeError", "but `best` is",
             sizes=MANY, ours=False),
        case("save(1, thing=Fickle())", "OSError", "the file is truncated"),
        case("Checkpointer(__file__).save(1)", "FileExistsError", "File exists",
             "while saving step 1", ours=False, label="`Checkpointer(a_file).save(1)`"),
        case("save_twice(3)", "RuntimeError", "one run at a time must write to", "attempt 2 has "
             "begun", "give it a directory of its own", ours=False,
             label="saving where another run has begun to save"),
        case("restore(model=5)", "TypeError", "`restore` must be given what has state_dict and "
             "load_state_dict, but `model` is an int", "values are in what it returns"),
        case("restore(step=1)", "TypeError", "but `step` is an int", "and `at` is the step"),
        case("restore(net())", "TypeError", "`objects` must be named, but a Linear is not: "
             "call restore(model=model)"),
        case("restore_in('first', at=7)", "ValueError", "`at` must be a step of which there is a "
             "checkpoint, but is 7", "has 1", ours=False, label="`restore(at=7)`"),
        case("restore(at='1')", "TypeError", "`at` must be an integer of at least 0, but is '1'"),
        case("restore(at=-1)", "ValueError", "`at` must be an integer of at least 0, but is -1"),
        case("restore(at=rank)", "RuntimeError", "every rank must pass the same", "`at` differs",
             sizes=MANY),
        case("restore_in('{}/attempt-0001-step-000000001')", "ValueError", "`directory` must be "
             "that of all checkpoints of a run, but", "is one of them: pass", ours=False,
             label="restoring from a checkpoint's own folder"),
        case("restore_in('frist')", "ValueError", "`directory` must be where the checkpoints are, "
             "but", "is not there, and", "has some: pass that, or make the directory", ours=False,
             label="restoring from `frist` where `first` has checkpoints"),
        case("restore(head=net())", "ValueError", "what is asked for must have been saved as "
             "something with a state, but 'head' not", "has 'model'"),
        case("restore(best=net())", "ValueError", "but 'best' not", "has 'model'"),
        case("restore(model=net(3))", "RuntimeError", "size mismatch for weight", ours=False),
        case("restore(**{'model' if rank else 'head': net()})", "RuntimeError",
             "every rank must pass the same to `Checkpointer.restore`", "`objects` differs",
             sizes=MANY),
        case("restore(model=net(1 + 2 * rank))", "RuntimeError", "size mismatch for weight",
             sizes=MANY, ours=False),
        case("spoil(truncate)", "RuntimeError", "one of the checkpoints in",
             "must be complete, but none is", "state.pt has", "Put a copy back, or remove them",
             ours=False, label="restoring where the only checkpoint is truncated"),
        case("spoil(exchange_for_code)", "RuntimeError", "one of the checkpoints in",
             "must be complete, but none is", "state.pt has", ours=False,
             label="restoring where the only checkpoint was exchanged for code"),
        case("export({})", "FileNotFoundError", "there must be a checkpoint in", "to export, but "
             "there is none", ours=False, label="`export` where nothing was saved"),
        case("export({'optimizer': adam()})", "ValueError", "but 'model' not", "has 'optimizer'",
             label="`export` where no model was saved"),
    ],
    "StopSignal": [
        case("StopSignal('SIGTERM')", "ValueError", "`signals` must be ones that can be caught, as "
             "signal.SIGTERM, but are 'SIGTERM'"),
        case("StopSignal(0)", "ValueError", "`signals` must be ones that can be caught", "are 0"),
        case("StopSignal(999)", "ValueError", "`signals` must be ones that can", "are 999"),
        case("StopSignal(True)", "ValueError", "`signals` must be ones that can", "are True"),
        case("StopSignal([15])", "ValueError", "`signals` must be ones that can", "are [15]"),
        case("StopSignal(9)", "ValueError", "`signals` must be ones that can", "are 9"),
    ],
}  # fmt: skip

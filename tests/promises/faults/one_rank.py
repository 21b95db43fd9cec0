"""A small training in which one rank does, after its fourth step, what the others do not.

Started once for each rank by test_one_rank.py, with a launcher's variables:
``python one_rank.py fault culprit directory seconds``.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import pardata

BATCH, AT, STEPS = 12, 3, 8


class Numbers(Dataset):
    """Kills the process that reads one of its last samples, if `deadly`."""

    def __init__(self, length=BATCH * STEPS, *, deadly=False):
        self.length, self.deadly = length, deadly

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.deadly and index >= BATCH * (AT + 1):
            note_the_time()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((2,), float(index))


class Stream(IterableDataset):
    """Does not say how long it is."""

    def __init__(self, length=BATCH * STEPS):
        self.length = length

    def __iter__(self):
        yield from (torch.full((2,), float(index)) for index in range(self.length))
        if self.length < BATCH * STEPS:
            note_the_time()


def note_the_time():
    """Let the test know when the fault happened."""
    (DIRECTORY / "fault").write_text(str(time.time()))


def square(model, rows):
    return model(rows).square().mean()


# --- what is wrong from the start: the data, the seed, the model


def data_of(fault):
    if fault == "shorter data":
        return Numbers(BATCH * STEPS - 1)
    if fault == "shorter stream":
        return Stream(BATCH * (AT + 1))
    return Numbers(deadly=fault == "dead worker")


def loader_of(fault, *, stream):
    if fault in ("shorter data", "seed"):
        note_the_time()
    data = Stream() if stream and fault != "shorter stream" else data_of(fault)
    return pardata.make_loader(
        data, BATCH, num_workers=0 if stream else 1, seed=5 if fault == "seed" else 0
    )


# --- what goes wrong on the way: what the culprit does, and then what all do


def raises(_):
    message = "the disk is on fire"
    raise OSError(message)


def send(signal_):
    return lambda _: os.kill(os.getpid(), signal_)


def reduces(_):
    pardata.all_reduce_sum(1)


def gathers(_):
    pardata.all_gather(1)


def in_turn(*calls):
    return lambda model: [call(model) for call in calls]


def changes_a_weight(model):
    with torch.no_grad():
        next(model.parameters()).add_(1)


def nothing(_):
    pass


FAULTS = {
    "raises": (raises, nothing),
    "exits": (lambda _: sys.exit(3), nothing),
    "sleeps": (lambda _: time.sleep(600), nothing),
    "stopped": (send(signal.SIGSTOP), nothing),
    "killed": (send(signal.SIGKILL), nothing),
    "one more reduce": (reduces, nothing),
    "one more barrier": (lambda _: pardata.barrier("data is ready"), nothing),
    "one more rank_zero_call": (lambda _: pardata.rank_zero_call(max, 1, 2), nothing),
    "other order": (in_turn(gathers, reduces), in_turn(reduces, gathers)),
    "other structure": (
        lambda _: pardata.all_reduce_mean({"loss": 1.0, "top1": 0.5}),
        lambda _: pardata.all_reduce_mean({"loss": 1.0}),
    ),
    "one more backward": (lambda model: pardata.backward(model, square, torch.ones(4, 2)), nothing),
    "other weights": (changes_a_weight, nothing),
    "one more save": (
        lambda model: pardata.Checkpointer(DIRECTORY / "run").save(1, model=model),
        nothing,
    ),
}


def train(fault, is_culprit):
    own_fault = fault if is_culprit else ""
    if own_fault == "model":
        note_the_time()
    model = pardata.wrap_model(nn.Linear(2, 3 if own_fault == "model" else 1))
    culprits, others = FAULTS.get(fault, (nothing, nothing))
    for step, rows in enumerate(loader_of(own_fault, stream=fault == "shorter stream")):
        pardata.backward(model, square, rows)
        with torch.no_grad():  # plain SGD: an optimizer imports half of torch first
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-1e-5)
                parameter.grad = None
        if step == AT and is_culprit and fault in (*FAULTS, "break"):
            note_the_time()
            if fault == "break":
                break
        if step == AT:
            (culprits if is_culprit else others)(model)
    pardata.rank_zero_call(min, 1, 2)
    pardata.check_in_sync(model)


def main():
    fault, culprit, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[4])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # All begin together, however long their imports took: joining has the group's timeout.
    (DIRECTORY / f"ready-{rank}").touch()
    while len(list(DIRECTORY.glob("ready-*"))) < size:
        time.sleep(0.05)
    torch.set_num_threads(1)
    with pardata.init(timeout=timedelta(seconds=seconds)):
        train(fault, rank == culprit)


if __name__ == "__main__":
    DIRECTORY = Path(sys.argv[3])
    main()

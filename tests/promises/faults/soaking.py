"""One long-lived group that meets one fault after the other, and what it holds of the machine."""

import math
import random
import resource
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import pardata


class Run:
    """A training, of which one rank (the culprit) goes wrong now and then."""

    def __init__(self, directory):
        self.directory = directory
        self.rank, self.size = pardata.world().rank, pardata.world().size
        data = TensorDataset(torch.randn(60, 4), torch.randint(2, (60,)))
        self.loader = pardata.make_loader(data, 12, microbatch_size=2, shuffle=True, seed=0)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 2))
        self.model = pardata.wrap_model(net, "exact")
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        self.saver = pardata.Checkpointer(directory / "checkpoints")
        self.background = pardata.Checkpointer(directory / "background", asynchronous=True)
        self.step = 0

    def train(self):
        """Train for an epoch, or what is left of it, and save."""
        for batch in self.loader:
            self.optimizer.zero_grad()
            pardata.backward(self.model, mean_loss, batch)
            self.optimizer.step()
            self.step += 1
        self.saver.save(self.step, **self.parts)
        self.background.save(self.step, **self.parts)
        pardata.check_in_sync(self.model)

    def other_structure(self, culprit):
        pardata.all_reduce_mean({"accuracy" if self.rank == culprit else "loss": 1.0})

    def rank_zero_fails(self, _culprit):
        pardata.rank_zero_call(int, "no number")

    def cannot_be_saved(self, culprit):
        self.saver.save(self.step + 1, what=print if self.rank == culprit else 1)

    def disk_is_full(self, _culprit):
        self.background.wait()  # the limit is that of the process
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        try:
            self.saver.save(self.step + 1, **self.parts)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)

    def loss_fails(self, culprit):
        def failing(model, batch):
            if self.rank == culprit:
                raise ArithmeticError
            return mean_loss(model, batch)

        for batch in self.loader:  # and is broken out of, on every rank
            pardata.backward(self.model, failing, batch)

    def gradient_is_nan(self, culprit):
        factor = torch.nan if self.rank == culprit else 1.0
        for batch in self.loader:
            loss = pardata.backward(self.model, lambda m, b: factor * mean_loss(m, b), batch)
            if loss.isnan():  # on every rank
                raise FloatingPointError

    def newest_is_damaged(self, _culprit):
        pardata.barrier()
        if self.rank == 0:
            newest = max((self.directory / "checkpoints").glob("attempt-*-step-*"))
            (newest / "state.pt").write_bytes(b"damaged")
        pardata.barrier()
        assert self.saver.restore(**self.parts).step < self.step
        self.saver.restore(optimizer=1)  # an error, as in the others

    def shares_differ(self, culprit):
        length = 50 if self.rank == culprit else 60
        pardata.make_loader(TensorDataset(torch.arange(length)), 12)


FAULTS = [
    name
    for name, value in vars(Run).items()
    if callable(value) and name not in ("__init__", "train")
]


def mean_loss(model, batch):
    points, labels = batch
    return cross_entropy(model(points), labels)


def held():
    """Return what this process holds of the machine."""
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "MB of memory": int(kilobytes) / 1024,
        "open files": entries("/proc/self/fd"),
        "threads": entries("/proc/self/task"),
        "shared-memory segments": entries("/dev/shm"),
    }


def entries(folder):
    return sum(1 for _ in Path(folder).iterdir())


def soak(directory, seed, *, rounds=math.inf, seconds=math.inf):
    """Train and fail in turns; return how often, and what was held at the start and at the end."""
    torch.set_num_threads(1)
    run, chance, counts, seen = Run(Path(directory)), random.Random(seed), Counter(), []
    until = time.monotonic() + seconds
    # Rank 0's clock decides for all.
    while len(seen) < rounds and pardata.rank_zero_call(lambda: time.monotonic() < until):
        run.train()
        fault, culprit = chance.choice(FAULTS), chance.randrange(run.size)
        try:
            getattr(run, fault)(culprit)
        except Exception:  # noqa: BLE001  # each is another one; that there is one on every rank counts
            counts[fault] += 1
        run.optimizer.zero_grad()
        seen.append(held())
    shutil.rmtree(directory, ignore_errors=True)
    third = len(seen) // 3
    early, late = seen[third : 2 * third], seen[2 * third :]
    middle = [{name: median(s[name] for s in part) for name in seen[0]} for part in (early, late)]
    return dict(counts), len(seen), run.step, *middle

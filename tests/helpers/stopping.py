"""A run with workers, to be stopped or killed: STARTS PERSISTENT FOLDER [WHEN].

STARTS is how workers start; with PERSISTENT 1 they live longer than an epoch. With WHEN it sends
SIGTERM to its process group, as a launcher does: "begins", as soon as a worker has begun; "ends",
in the last finalizer of one, and says so if its interpreter still ends after that.
"""

import os
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize

import torch

from pardata import Checkpointer, StopSignal, init, make_loader


class AtTheEnd:
    """Says that the interpreter forgets it: by then Python has no signal handlers."""

    def __del__(self, write=os.write):
        write(1, b"the interpreter of a worker ends\n")


class Numbers(torch.utils.data.Dataset):
    """Numbers that take a moment each."""

    def set_epoch(self, epoch):
        """Have one worker of the first epoch send the signal."""
        worker = torch.utils.data.get_worker_info()
        if "ends" in sys.argv and epoch == 0 and worker and worker.id == 0:
            sys.at_the_end = AtTheEnd()
            Finalize(None, os.killpg, (0, signal.SIGTERM), exitpriority=-199)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.01)
        return float(index)


def train(starts, persistent, folder):
    """Train until it is stopped; save at each step, in the background."""
    step = 0
    with init(), Checkpointer(folder, asynchronous=True) as checkpointer, StopSignal() as stop:
        loader = make_loader(
            Numbers(), 4, num_workers=2, persistent_workers=persistent == "1", device=None,
            multiprocessing_context=starts,
        )  # fmt: skip
        print("begins", flush=True)
        for _ in range(1000):
            for _ in loader:
                step += 1
                checkpointer.save(step)
                if step == 3:
                    print("reads", flush=True)
                if stop.agreed():
                    print(f"stopped after {step}", flush=True)
                    return


def begin_and_signal(worker, begin=BaseProcess.start):
    """Start a worker; then this process and its workers get the signal."""
    begin(worker)
    os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    if "begins" in sys.argv:
        BaseProcess.start = begin_and_signal
    train(*sys.argv[1:4])
    print("ended well", flush=True)

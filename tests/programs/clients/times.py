"""Print the time of a step of each script, as plain PyTorch and with pardata, in one process.

Both run at once and take turns, a step each, so that what else the machine does hits both alike.

    PYTHONPATH=src:tests/helpers python tests/programs/clients/times.py
"""

import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import test_more_clients as clients
import torch
from test_clients import as_script, write_photos_and_words, written
from torch.optim.optimizer import register_optimizer_step_post_hook

WARM_UP = 10  # steps that are not counted
STEPS = 60
LONGER = {
    "detect": ["--images", 2000],
    "lm": ["--epochs", 100, "--batch-size", 4],  # one microbatch a step
    "tars": ["--epochs", 100],
    "imagenet": ["--epochs", 100],
}


class EnoughError(Exception):
    """Ends a script in the middle."""


def timed(job, mine, other, pipe):
    """Run a script, wait for the turn after each step, and send how long the steps took."""
    times, start = [], [0.0]

    def step_done(*_args):
        times.append(time.perf_counter() - start[0])
        other.release()
        if len(times) == WARM_UP + STEPS:
            raise EnoughError
        mine.acquire()
        start[0] = time.perf_counter()

    torch.set_num_threads(1)
    mine.acquire()
    register_optimizer_step_post_hook(step_done)
    try:
        as_script(*job)
    except EnoughError:
        pipe.send(times[WARM_UP:])


def medians(name, data):
    """Return the median milliseconds of a step of the plain script, and of the one with pardata."""
    context = multiprocessing.get_context("spawn")
    turns = context.Semaphore(1), context.Semaphore(0)
    args = [*(data / folder for folder in clients.FOLDERS[name]), *clients.PLAIN[name]]
    processes, pipes = [], []
    for number, script in enumerate((name, f"{name}_pardata")):
        directory = data / script
        directory.mkdir()
        job = written(script, directory), [*args, *LONGER[name]], directory, torch.float32
        receiver, sender = context.Pipe(duplex=False)
        others = turns[number], turns[1 - number], sender
        processes.append(context.Process(target=timed, args=(job, *others)))
        pipes.append(receiver)
    for process in processes:
        process.start()
    found = [1000 * median(pipe.recv()) for pipe in pipes]
    for process in processes:
        process.join()
    return found


def main():
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory)
        write_photos_and_words(data)
        clients.write_shards(data / "shards")
        for name in clients.PLAIN:
            plain, ported = medians(name, data)
            print(f"{name:9} {plain:7.2f} ms {ported:7.2f} ms  {ported / plain:.2f}", flush=True)


if __name__ == "__main__":
    main()

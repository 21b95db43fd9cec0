r"""Start all processes again when one dies, in less than a second: forked, with torch imported.

    python examples/warm.py                # an undisturbed run, for its fingerprint
    python examples/warm.py --kill 1@23    # kill -9 of rank 1 after step 23

    torchrun --standalone --nproc-per-node=3 --max-restarts=3 examples/warm.py --kill 1@23 \
        --run-dir /dev/shm/run             # the same, but torchrun starts Python again

A server imports torch once, and forks the ranks. When one dies, it kills the others, and forks all
of them again. They resume from the newest checkpoint in /dev/shm, which is memory. That survives a
process, but not its host: save to a disk too, after more steps.

A forked process cannot use CUDA if its parent does. So the server only imports and forks, and each
rank on a GPU makes its own CUDA context.
"""

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from argparse import ArgumentParser, RawTextHelpFormatter
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer of a process would import it, in a second or more
from torch import nn
from torch.utils.data import TensorDataset

import pardata


def mean_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(args):
    """Train from the newest checkpoint to the end; each rank calls it."""
    died = Path(args.run_dir, "died")  # its time is that of the last death
    with pardata.init() as world:
        pardata.seed_everything(0)
        data = TensorDataset(torch.randn(512, 64), torch.arange(512) % 10)
        loader = pardata.make_loader(data, 64, microbatch_size=8, shuffle=True)
        net = nn.Sequential(nn.BatchNorm1d(64), nn.Dropout(0.25), nn.Linear(64, 10))
        model = pardata.wrap_model(net, "exact")
        optimizer = torch.optim.Adam(model.parameters())
        run = {"model": model, "optimizer": optimizer, "loader": loader}
        checkpointer = pardata.Checkpointer(f"{args.run_dir}/checkpoints", keep=2)
        begin = step = checkpointer.restore(**run).step
        for _epoch in loader.epochs(8):
            for batch in loader:
                if args.kill == f"{world.rank}@{step}" and not died.exists():
                    died.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                pardata.backward(model, mean_loss, batch)
                optimizer.step()
                step += 1
                if world.is_main and step == begin + 1 and died.exists():
                    after = f"{time.time() - died.stat().st_mtime:.2f} s after a death"
                    print(f"resumed after step {begin}: step {step}, {after}", flush=True)
                if step % 5 == 0:
                    checkpointer.save(step, **run)
        if world.is_main:
            print(f"fingerprint {pardata.fingerprint(model)}", flush=True)


def train_as(rank, port, args):
    """Set the variables that torchrun would set, and train."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(args.size), LOCAL_WORLD_SIZE=str(args.size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train(args)


def serve(args):
    """Fork all ranks; when one dies, end the others and fork all again. Return the exit status."""
    fork = multiprocessing.get_context("fork").Process
    for _start in range(1 + args.max_restarts):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = [fork(target=train_as, args=(rank, port, args)) for rank in range(args.size)]
        try:
            for one in ranks:
                one.start()
            while not (dead := [rank for rank, one in enumerate(ranks) if one.exitcode]):
                if not (running := [one.sentinel for one in ranks if one.is_alive()]):
                    return 0
                wait(running)
            Path(args.run_dir, "died").touch()
            print(f"rank {dead[0]} died with status {ranks[dead[0]].exitcode}", flush=True)
        finally:
            for one in ranks:
                one.kill()
                one.join()
    return 1


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=3, help="number of ranks")
    parser.add_argument("--max-restarts", type=int, default=3, help="how often to start again")
    parser.add_argument("--kill", metavar="RANK@STEP", help="a rank, and the step before its death")
    parser.add_argument("--run-dir", help="for checkpoints (default: a new folder in /dev/shm)")
    args = parser.parse_args()
    if "RANK" in os.environ:  # torchrun has started this process
        train(args)
        sys.exit()
    with tempfile.TemporaryDirectory(prefix="warm-", dir="/dev/shm") as memory:
        args.run_dir = args.run_dir or memory
        print(f"checkpoints in {args.run_dir}", flush=True)
        sys.exit(serve(args))

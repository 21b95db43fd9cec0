"""Train on while a process dies and a new one joins: the weights are bitwise identical.

    python examples/survive.py                # an undisturbed run, for its fingerprint
    python examples/survive.py --kill 2@30    # kill -9 of process p2 after step 30

A launcher serves the store, and starts a new process for one that was killed. The others leave the
group as their step fails. Once all have, the launcher sends each its new rank, and they repeat the
step. Rank 0 has done the most steps, and sends its state to all. New processes join every 20 steps.
It is for one host and CPUs. `warm.py`, which starts all processes again, is simpler.
"""

import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, RawTextHelpFormatter
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn

import pardata


def mean_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Run:
    """The training in one process: its state, and how it meets the other processes."""

    def __init__(self, args):
        self.args, self.name, self.step, self.position = args, os.environ["NAME"], 0, None
        server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
        self.store = dist.PrefixStore("launcher", server)
        pardata.seed_everything(0)
        self.data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.arange(512) % 10)
        self.net = nn.Sequential(nn.BatchNorm1d(64), nn.Dropout(0.25), nn.Linear(64, 10))
        self.optimizer = torch.optim.Adam(self.net.parameters())

    def run(self):
        """Train with all processes that are here, until all is done."""
        done = False
        while not done:
            self.store.set(f"step/{self.name}", str(self.step))
            rank, size = self.store.queue_pop(f"rank/{self.name}").decode().split()  # it waits
            os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
            with ExitStack() as group:  # an error that leaves `with init()` would keep the group
                try:
                    done = self.train(group.enter_context(pardata.init(timeout=30)))
                except (RuntimeError, TimeoutError) as error:
                    print(f"{self.name}, step {self.step + 1}: {str(error)[:99]} …", flush=True)
        print(f"{self.name}: fingerprint {pardata.fingerprint(self.net)}", flush=True)

    def train(self, world):
        """Train until all is done, or new processes may join; return whether all is done."""
        loader = pardata.make_loader(self.data, 64, microbatch_size=8, shuffle=True, seed=0)
        model = pardata.wrap_model(self.net, "exact")  # again, because a wrapper holds its group
        state = self.step, self.position or loader.state_dict(), self.optimizer.state_dict()
        first, self.position, state = pardata.broadcast(state)
        self.optimizer.load_state_dict(state)
        loader.load_state_dict(self.position)
        self.step, died = first, float(self.store.get("died"))
        for _epoch in loader.epochs(8):
            for batch in loader:
                if self.step % 20 == 0 and world.size < self.args.size:
                    return False
                if self.args.kill == f"{self.name[1:]}@{self.step}":
                    os.kill(os.getpid(), signal.SIGKILL)
                self.optimizer.zero_grad()
                pardata.backward(model, mean_loss, batch)
                self.optimizer.step()
                self.step, self.position = self.step + 1, loader.state_dict()
                if world.is_main and self.step == first + 1:
                    after = f", {time.monotonic() - died:.2f} s after a death" if died else ""
                    print(f"step {self.step} on world size {world.size}{after}", flush=True)
        return True


def launch(args):
    """Start processes; when all are here, send each its rank. Return the exit status."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store, env = dist.PrefixStore("launcher", server), {**os.environ, "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    store.set("died", "0")
    processes, members, group, status = {}, set(), None, 0
    while status == 0 and (members or group is None):
        while len(processes) < args.size:
            variables = {**env, "NAME": (name := f"p{store.add('started', 1)}")}
            processes[name] = subprocess.Popen([sys.executable, *sys.argv], env=variables)  # noqa: S603  # this script
        time.sleep(0.005)
        for name in [name for name in processes if processes[name].poll() is not None]:
            members.discard(name)
            status = max(status, processes[name].returncode)
            if processes[name].returncode < 0:
                del processes[name]
                store.set("died", str(time.monotonic()))
                print(f"{name} was killed, and a new process starts", flush=True)
        waiting = {name for name in processes if store.check([f"step/{name}"])}
        crew = members if group and members < group else {*processes}  # new ones wait after a death
        if waiting >= crew:
            status = int(crew == group)  # nobody has died or joined: an error in the script
            members, group = {*crew}, {*crew}
            order = sorted(crew, key=lambda name: (-int(store.get(f"step/{name}")), name))
            for rank, name in enumerate(order):
                store.delete_key(f"step/{name}")
                store.queue_push(f"rank/{name}", f"{rank} {len(order)}")
    for process in processes.values():
        process.kill()
    return status if any(process.poll() == 0 for process in processes.values()) else 1


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=3, help="number of processes")
    parser.add_argument("--kill", metavar="NUMBER@STEP", help="a process, and the step before")
    args = parser.parse_args()
    sys.exit(Run(args).run() if "NAME" in os.environ else launch(args))

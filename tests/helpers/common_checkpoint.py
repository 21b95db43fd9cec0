"""A small run, a digest of all that must survive, and forgery, for the tests of checkpoints."""

import hashlib
import json
import resource
from pathlib import Path

import torch
from sharding import whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

from pardata import Checkpointer, backward, fingerprint, make_loader, world, wrap_model
from pardata.checkpoint._directory import checkpoint_names
from pardata.checkpoint._manifest import _digest, record_of, verified

STRATEGIES = ("none", "dp", "ddp", "fsdp", "exact")


class Net(nn.Module):
    """With tied weights, a frozen layer, batch norm and dropout."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.decode = nn.Linear(8, 8, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, rows):
        return self.decode(self.frozen(self.dropout(self.norm(self.encode(rows)))))


class Run:
    """A model under a strategy, an optimizer, a scheduler and a loader."""

    def __init__(self, strategy, seed=0, **options):
        torch.manual_seed(seed)
        self.model = wrap_model(Net(), strategy, device="cpu", **options)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        rows = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
        self.loader = make_loader(
            TensorDataset(rows), *(12,), shuffle=True, seed=5, microbatch_size=3, num_workers=0
        )

    def train(self, steps):
        while steps:
            for batch in self.loader:
                self.optimizer.zero_grad()
                backward(self.model, lambda model, rows: model(rows[0]).square().mean(), batch)
                self.optimizer.step()
                self.scheduler.step()
                steps -= 1
                if not steps:
                    return self
        return self

    def objects(self):
        names = ("model", "optimizer", "scheduler", "loader")
        return {name: getattr(self, name) for name in names}

    def digest(self):
        """Return a hash of everything; collective where parameters are sharded."""
        states = self.optimizer.state_dict()
        values = {
            f"{number}.{key}": whole(value).tolist() if torch.is_tensor(value) else value
            for number, own in states["state"].items()
            for key, value in own.items()
        }
        rest = [states["param_groups"], self.scheduler.state_dict(), self.loader.state_dict()]
        text = json.dumps([fingerprint(self.model), values, rest])
        return hashlib.sha256(text.encode()).hexdigest()


def whole_steps(directory):
    """Return the steps of all checkpoints, from the oldest to the newest, all of them whole."""
    found = checkpoint_names(directory)
    for name in found:
        verified(directory / str(name), name.step)
    return [name.step for name in found]


def leftovers(directory):
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))


def save_steps(directory, *steps, **options):
    """Save a value, the step itself, at these steps, in a single process."""
    checkpointer = Checkpointer(directory, **options)
    for step in steps:
        checkpointer.save(step, value=torch.full((50,), step))
    return checkpointer


def limited(size=2_000_000):
    """Let this process write small files only, as on a full disk; return how to end it.

    Only on fresh ranks: the store of those that live on is a file, which grows.
    """
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def sharded(value):
    from torch.distributed.tensor import DTensor, Shard

    here = world()
    mesh = init_device_mesh("cpu", (here.size,))
    # Without a message: gloo cannot send all types in older PyTorch.
    part = value.chunk(here.size)[here.rank].clone()
    form = {"shape": value.shape, "stride": value.stride()}
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, **form)


class Thing:
    """Has whatever state it is given, as of sharded tensors."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def paths(directory):
    """Return the folders of all checkpoints, from the oldest to the newest."""
    return [directory / str(name) for name in checkpoint_names(directory)]


# --- made up by somebody who means harm


class Harm:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def sign(checkpoint, **facts):
    """Give a checkpoint a manifest of what is in it now, with the right checksums."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())["manifest"]
    found = [f for f in checkpoint.rglob("*") if f.is_file() and f.name != "manifest.json"]
    files = {str(f.relative_to(checkpoint)): record_of(f) for f in found}
    manifest |= {"files": files, **facts}
    signed = {"sha256": _digest(manifest), "manifest": manifest}
    (checkpoint / "manifest.json").write_text(json.dumps(signed))

"""A double of torchtitan 0.3, whose trainer needs a GPU: what that calls of its dataloader.

Made of its `components/dataloader.py`, `trainer.py`, `validate.py` and `checkpointer/dcp.py`.
"""

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

STEPS, EPOCH = 10, 5


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self, **kwargs):
            return self._owner(self, **kwargs)

    def __init_subclass__(cls):
        cls.Config._owner = cls


class BaseDataLoader(Stateful, ABC, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dataset: str = ""
        dataset_path: str | None = None

    @abstractmethod
    def __iter__(self): ...


class CheckpointManager(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable: bool = False
        interval: int = 500


class Trainer(Stateful, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dataloader: BaseDataLoader.Config
        checkpoint: CheckpointManager.Config

    def __init__(self, config):
        dist.init_process_group("gloo")
        self.config, self.step = config, 0
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Linear(1, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        every = config.checkpoint.interval
        self.dataloader = self.build(config.dataloader, snapshot_every_n_steps=every)
        self.states = {"train_state": self, "dataloader": self.dataloader}

    def build(self, config, **kwargs):
        ranks = {"dp_world_size": dist.get_world_size(), "dp_rank": dist.get_rank()}
        texts = {"tokenizer": None, "seq_len": 1}
        local_batch_size = 8 // dist.get_world_size()
        return config.build(**ranks, **texts, local_batch_size=local_batch_size, **kwargs)

    def state_dict(self):
        return {"step": self.step, "model": self.model.module.state_dict()}

    def load_state_dict(self, state):
        self.step = state["step"]
        self.model.module.load_state_dict(state["model"])

    def train(self):
        saved = [int(folder.name.split("-")[1]) for folder in Path().glob("step-*")]
        if saved:
            dcp.load(self.states, checkpoint_id=f"step-{max(saved)}")
        batches = self.batch_generator(self.dataloader)
        while self.step < STEPS:
            self.step += 1
            self.train_step(batches)
            if self.step % self.config.checkpoint.interval == 0:
                dcp.save(self.states, checkpoint_id=f"step-{self.step}")
            if self.step % EPOCH == 0:
                self.validate()
        dist.destroy_process_group()

    def batch_generator(self, dataloader):
        batches = iter(dataloader)
        while True:
            inputs, labels = next(batches)
            yield inputs, labels

    def train_step(self, batches):
        inputs, labels = next(batches)
        samples = torch.tensor(len(labels))
        dist.all_reduce(samples)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(inputs["input"]), labels, reduction="sum")
        (loss / samples * dist.get_world_size()).backward()
        self.optimizer.step()

    def validate(self):
        self.model.eval()
        config = replace(self.config.dataloader, count=15, infinite=False)
        right = torch.tensor(0)
        for inputs, labels in self.build(config):
            right += (self.model(inputs["input"]).argmax(1) == labels).sum()
        dist.all_reduce(right)
        if dist.get_rank() == 0:
            print(f"epoch {self.step // EPOCH - 1}: {right} of 15 right")
        self.model.train()


def pretend():
    """Be what a script imports as torchtitan."""
    parts = {
        "torchtitan.components.checkpointer": CheckpointManager,
        "torchtitan.components.dataloader": BaseDataLoader,
        "torchtitan.trainer": Trainer,
    }
    for name, found in parts.items():
        sys.modules[name] = module = ModuleType(name)
        setattr(module, found.__name__, found)
        above, _, own = name.rpartition(".")
        setattr(sys.modules.setdefault(above, ModuleType(above)), own, module)

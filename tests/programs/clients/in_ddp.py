"""Train with DistributedDataParallel by hand, resuming at the next epoch."""

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 4


def points(count):
    """Return points on a line, and on which side of its middle each is."""
    x = torch.linspace(-1, 1, count).unsqueeze(1)
    return TensorDataset(x, (x[:, 0] > 0).long())


def train():
    torch.manual_seed(0)
    data = points(40)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8 // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(nn.Linear(1, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin = 0
    if Path("last.pt").exists():
        last = torch.load("last.pt")
        model.module.load_state_dict(last["model"])
        optimizer.load_state_dict(last["optimizer"])
        begin = last["epoch"] + 1
    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            logging.getLogger("train").info("epoch %d: loss %.4f", epoch, loss)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch}, "last.pt")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()

"""Train with Lightning Fabric, in a loop of one's own that resumes from its last checkpoint."""

import os
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVERY = 2  # steps from one checkpoint to the next


def points(count):
    """Return points on a line, and on which side of its middle each is."""
    x = torch.linspace(-1, 1, count).unsqueeze(1)
    return TensorDataset(x, (x[:, 0] > 0).long())


def main():
    fabric = Fabric(strategy="ddp", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Linear(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    loader = DataLoader(points(40), 8 // fabric.world_size, shuffle=True, drop_last=True)
    eval_loader = DataLoader(points(15), 4)
    loader, eval_loader = fabric.setup_dataloaders(loader, eval_loader)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if Path("last.ckpt").exists():
        fabric.load("last.ckpt", state)
    for epoch in range(state["step"] // len(loader), 2):
        skipped = state["step"] - epoch * len(loader)
        for batch, (x, y) in enumerate(loader):
            if batch < skipped:
                continue
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            if state["step"] % EVERY == 0:
                fabric.save("last.ckpt", state)
        model.eval()
        right = sum((model(x).argmax(1) == y).sum() for x, y in eval_loader)
        right = int(fabric.all_reduce(right, reduce_op="sum"))
        model.train()
        fabric.print(f"epoch {epoch}: {right} of {len(eval_loader.dataset)} right")


if __name__ == "__main__":
    main()

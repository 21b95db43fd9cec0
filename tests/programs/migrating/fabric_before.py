import os

import torch
from lightning_fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]))
    fabric.launch()
    torch.manual_seed(0)
    images, labels = (torch.tensor(array[:1792]) for array in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=64 // fabric.world_size))
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
        fabric.save("last.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
    loss = fabric.all_reduce(loss.detach(), reduce_op="mean")
    fabric.print(f"loss {loss:.6f}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

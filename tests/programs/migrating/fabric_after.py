import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from pardata import Checkpointer, backward, init, make_loader, wrap_model


def mean_loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


with init() as world, Checkpointer("checkpoints") as checkpointer:
    torch.manual_seed(0)
    images, labels = (torch.tensor(array[:1792]) for array in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    loader = make_loader(data, batch_size=64)
    model = wrap_model(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpointer.restore(**run)  # of a run before, if there was one
    for epoch in loader.epochs(3):
        for batch in loader:
            optimizer.zero_grad()
            loss = backward(model, mean_loss, batch)
            optimizer.step()
        checkpointer.save(epoch, **run)
        if world.is_main:
            print(f"loss {loss:.6f}")

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from pardata import backward, init, make_loader, progress, wrap_model


def mean_loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


with init() as world:
    torch.manual_seed(0)
    images, labels = (torch.tensor(array[:1792]) for array in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    loader = make_loader(data, batch_size=64)
    model = wrap_model(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for batch in progress(loader, f"epoch {epoch + 1}"):
            optimizer.zero_grad()
            loss = backward(model, mean_loss, batch)
            optimizer.step()
    if world.is_main:
        print(f"loss {loss:.6f}")

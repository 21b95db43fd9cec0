import ignite.distributed as idist
import torch
from ignite.engine import Engine
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def training(local_rank):
    torch.manual_seed(0)
    images, labels = (torch.tensor(array[:1792]) for array in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    loader = idist.auto_dataloader(data, batch_size=64, shuffle=False)
    model = idist.auto_model(nn.Linear(64, 10))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))

    def step(engine, batch):
        x, y = (tensor.to(idist.device()) for tensor in batch)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    state = Engine(step).run(loader, max_epochs=3)
    loss = idist.all_reduce(state.output) / idist.get_world_size()
    if idist.get_rank() == 0:
        print(f"loss {loss:.6f}")


if __name__ == "__main__":
    with idist.Parallel(backend="nccl" if torch.cuda.is_available() else "gloo") as parallel:
        parallel.run(training)

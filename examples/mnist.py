"""Train a small convolutional net on handwritten digits, in one process or in many.

    python examples/mnist.py --data digits
    torchrun --standalone --nproc-per-node=2 examples/mnist.py --data digits    # the same losses

With strategy "exact" losses and weights are bitwise identical on any number of processes.
MNIST is downloaded to ./data; --data digits needs no download: they are scikit-learn's.
"""

from argparse import ArgumentParser, RawTextHelpFormatter

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

import pardata


def load(name):
    if name == "digits":
        images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
        data = TensorDataset(images.view(-1, 1, 8, 8).float() / 16, labels)
        return Subset(data, range(1500)), Subset(data, range(1500, len(data)))
    with pardata.rank_zero_first(local=True):  # one process of each node downloads
        return [MNIST("data", train, ToTensor(), download=True) for train in (True, False)]


def loss_and_accuracy(model, batch):
    images, labels = batch
    scores = model(images)
    return F.cross_entropy(scores, labels), (scores.argmax(1) == labels).float().mean()


@torch.no_grad()
def accuracy(model, loader):
    """Return the share of the test set that is recognized; each image counts once."""
    model.eval()
    correct = sum((model(images).argmax(1) == labels).sum() for images, labels in loader)
    model.train()
    return pardata.all_reduce_sum(correct) / len(loader.dataset)


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--data", choices=["mnist", "digits"], default="mnist", help="images")
    parser.add_argument("--strategy", default="exact", help="as of wrap_model: exact, ddp, fsdp, …")
    parser.add_argument("--epochs", type=int, default=5, help="times through the training set")
    args = parser.parse_args()
    with pardata.init() as world:  # joins torchrun, srun or mpirun; one process has nothing to join
        pardata.seed_everything(0)
        train_set, test_set = load(args.data)
        # 64 images a step, over all processes, run in pieces of 8.
        loader = pardata.make_loader(train_set, batch_size=64, microbatch_size=8, shuffle=True)
        test_loader = pardata.make_loader(test_set, batch_size=1000)
        net = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(4), nn.Flatten()),
            *(nn.Dropout(0.5), nn.Linear(1024, 10)),
        )
        model = pardata.wrap_model(net, args.strategy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
        for epoch in loader.epochs(args.epochs):
            for batch in pardata.progress(loader, f"epoch {epoch + 1}"):
                optimizer.zero_grad()
                loss, right = pardata.backward(model, loss_and_accuracy, batch)  # of all 64
                optimizer.step()
            tested = accuracy(model, test_loader)
            if world.is_main:
                print(f"epoch {epoch + 1}: loss {loss:.6f}, train {right:.2%}, test {tested:.2%}")
        weights = pardata.fingerprint(model)[:16]
        if world.is_main:
            print(f"weights {weights}, trained on world size {world.size}")


if __name__ == "__main__":
    main()

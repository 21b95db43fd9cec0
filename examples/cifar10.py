"""Train a ResNet-18 on CIFAR-10: checkpoints, preemption, metrics, on one machine or on many.

    python examples/cifar10.py --data digits --epochs 4
    torchrun --standalone --nproc-per-node=2 examples/cifar10.py --data digits --epochs 4
    srun --ntasks=8 python examples/cifar10.py --run-dir runs/cifar10    # see slurm/

SIGTERM, or SIGUSR2 of SLURM's --signal, saves and ends the run. With the same --run-dir it resumes,
on any number of processes. The digits need no download, and half a minute an epoch on a CPU core.
"""

import logging
import sys
from argparse import ArgumentParser, RawTextHelpFormatter

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import Subset, TensorDataset
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18
from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

import pardata

log = pardata.get_logger("cifar10")  # INFO lines come from rank 0 alone


def load(name):
    if name == "digits":
        images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
        images = F.interpolate(images.view(-1, 1, 8, 8).float() / 16, 32).expand(-1, 3, -1, -1)
        data = TensorDataset(images, labels)
        return Subset(data, range(1500)), Subset(data, range(1500, len(data)))
    plain = [ToTensor(), Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))]
    augmented = Compose([RandomCrop(32, padding=4), RandomHorizontalFlip(), *plain])
    with pardata.rank_zero_first(local=True):  # one process of each node downloads
        train_set = CIFAR10("data", transform=augmented, download=True)
        return train_set, CIFAR10("data", train=False, transform=Compose(plain))


def loss_and_accuracy(model, batch):
    scores, labels = model(batch[0]), batch[1]
    return F.cross_entropy(scores, labels), (scores.argmax(1) == labels).float().mean()


@torch.no_grad()
def accuracy(model, loader):
    """Return the share of the test set that is recognized; each image counts once."""
    model.eval()
    correct = sum((model(images).argmax(1) == labels).sum() for images, labels in loader)
    model.train()
    return float(pardata.all_reduce_sum(correct)) / len(loader.dataset)


def train(args):
    """Train to the end, or to a signal: then return the exit status."""
    pardata.seed_everything(0)
    train_set, test_set = load(args.data)
    loader = pardata.make_loader(train_set, batch_size=64, microbatch_size=16, shuffle=True)
    test_loader = pardata.make_loader(test_set, batch_size=500)
    # An epoch of the digits is 23 steps: at PyTorch's 0.1 the statistics for tests are far behind.
    net = resnet18(num_classes=10, norm_layer=lambda size: torch.nn.BatchNorm2d(size, momentum=0.3))
    model = pardata.wrap_model(net, args.strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    run = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpointer = pardata.Checkpointer(f"{args.run_dir}/checkpoints", asynchronous=True)
    step = checkpointer.restore(**run).step
    metrics = pardata.MetricWriter(args.run_dir, after=step)  # later lines are of a killed run
    with pardata.StopSignal() as stop, checkpointer, metrics:
        for epoch in loader.epochs(args.epochs):
            for batch in loader:
                optimizer.zero_grad()
                loss, right = pardata.backward(model, loss_and_accuracy, batch)  # of all 64
                optimizer.step()
                step += 1
                if step % 10 == 0:
                    log.info("step %d: loss %.6f, accuracy %.2f %%", step, loss, 100 * right)
                    metrics.write(step, {"train/loss": loss, "train/accuracy": right})
                if stop.agreed():  # on all ranks at the same step
                    checkpointer.save(step, **run)
                    return args.requeue
            tested, time = accuracy(model, test_loader), loader.stats()
            log.info("epoch %d: test accuracy %.2f %%", epoch + 1, 100 * tested)
            log.info("%.1f s, of which %.1f s for data", time["seconds"], time["wait_seconds"])
            metrics.write(step, {"test/accuracy": tested, "time/epoch": time["seconds"]})
            checkpointer.save(step, **run)
        log.info("weights %s", pardata.fingerprint(model)[:16])
        return 0


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--data", choices=["cifar10", "digits"], default="cifar10", help="images")
    parser.add_argument("--strategy", default="exact", help="as of wrap_model: exact, ddp, fsdp, …")
    parser.add_argument("--epochs", type=int, default=10, help="times through the training set")
    parser.add_argument("--run-dir", default="runs/cifar10", help="for checkpoints and metrics")
    parser.add_argument("--requeue", type=int, default=0, help="exit status of a stopped run")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with pardata.init():  # joins torchrun, srun or mpirun; one process has nothing to join
        status = train(args)
    sys.exit(status)

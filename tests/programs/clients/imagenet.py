"""Train an image classifier on a folder of photos, with warm-up, and keep the best of it."""

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its name everywhere
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader
from torchvision import datasets, models
from torchvision import transforms as T  # noqa: N812  # its name in torchvision's own scripts

NORMAL = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def judged(model, batch):
    """Return the loss, and the shares of images whose class is the likeliest, or of the best 3."""
    images, labels = batch
    scores = model(images)
    right = scores.topk(3).indices == labels[:, None]
    accuracies = {f"top{k}": right[:, :k].any(dim=1).to(scores.dtype).mean() for k in (1, 3)}
    return F.cross_entropy(scores, labels, label_smoothing=0.1), accuracies


def train(model, loader, optimizer, schedule, device):
    """Train for an epoch, and return the means of its loss and accuracies."""
    model.train()
    sums = {}
    for batch in loader:
        batch = [tensor.to(device) for tensor in batch]  # noqa: PLW2901
        optimizer.zero_grad()
        loss, accuracies = judged(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        for name, value in {"loss": loss.detach(), **accuracies}.items():
            sums[name] = sums.get(name, 0) + value
    return {name: float(value / len(loader)) for name, value in sums.items()}


@torch.no_grad()
def evaluate(model, loader, device):
    """Return the mean loss and accuracies over all images."""
    model.eval()
    sums, images = {}, 0
    for batch in loader:
        batch = [tensor.to(device) for tensor in batch]  # noqa: PLW2901
        loss, accuracies = judged(model, batch)
        for name, value in {"loss": loss, **accuracies}.items():
            sums[name] = sums.get(name, 0) + value * len(batch[1])
        images += len(batch[1])
    return {name: float(total / images) for name, total in sums.items()}


def loaders(args):
    """Return a loader of the images to train on, and one of those to evaluate on."""
    end = [T.ToTensor(), T.ConvertImageDtype(torch.get_default_dtype()), T.Normalize(**NORMAL)]
    crop = T.Compose([T.RandomResizedCrop(args.size), T.RandomHorizontalFlip(), *end])
    whole = T.Compose([T.Resize(args.size), T.CenterCrop(args.size), *end])
    photos = datasets.ImageFolder(args.data / "train", crop)
    others = datasets.ImageFolder(args.data / "val", whole)
    kwargs = {"batch_size": args.batch_size, "num_workers": args.workers}
    loader = DataLoader(photos, shuffle=True, drop_last=True, **kwargs)
    return loader, DataLoader(others, **kwargs)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--arch", default="resnet18")
    parser.add_argument("--norm", choices=["batch", "group"], default="batch")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    loader, others = loaders(args)
    norm = {"norm_layer": partial(nn.GroupNorm, 8)} if args.norm == "group" else {}
    net = models.get_model(args.arch, num_classes=len(others.dataset.classes), **norm).to(device)
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    warm = len(loader)
    parts = [
        LinearLR(optimizer, 0.1, total_iters=warm),
        CosineAnnealingLR(optimizer, max(1, (args.epochs - 1) * len(loader))),
    ]
    schedule = SequentialLR(optimizer, parts, [warm])
    run = {"model": net, "optimizer": optimizer, "schedule": schedule}
    best = 0.0
    for epoch in range(args.epochs):
        trained = train(net, loader, optimizer, schedule, device)
        tested = evaluate(net, others, device)
        print(f"epoch {epoch}: train {trained} test {tested}")
        torch.save({name: part.state_dict() for name, part in run.items()}, "last.pt")
        if tested["top1"] > best:
            best = tested["top1"]
            torch.save(net.state_dict(), "imagenet.pt")


if __name__ == "__main__":
    main()

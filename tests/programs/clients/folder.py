"""Train an image classifier on a folder of photos: train/<class>/*.jpg and val/<class>/*.jpg."""

import argparse
import logging
import random
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

log = logging.getLogger("folder")


class AverageMeter:
    """Keeps the sum, the count and the average of a value."""

    def __init__(self, name):
        self.name = name
        self.sum = 0.0
        self.count = 0

    def update(self, value, n):
        self.sum += float(value) * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def accuracy(output, target, topk):
    """Return the percentage of samples whose class is among the k most likely, for each k."""
    _, predicted = output.topk(max(topk), dim=1)
    correct = predicted == target[:, None]
    return [100 * correct[:, :k].any(dim=1).float().mean() for k in topk]


def train(loader, model, criterion, optimizer, epoch, args):  # noqa: PLR0917  # as scripts do
    meters = loss_meter, top1, top5 = [AverageMeter(name) for name in ("loss", "top1", "top5")]
    model.train()

    for step, batch in enumerate(loader):
        images, target = (tensor.to(args.device) for tensor in batch)
        output = model(images)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        loss_meter.update(loss.item(), len(target))
        top1.update(acc1, len(target))
        top5.update(acc5, len(target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.print_freq == 0:
            report(f"epoch {epoch} step {step}/{len(loader)}", meters)


@torch.no_grad()
def validate(loader, model, criterion, args):
    meters = loss_meter, top1, top5 = [AverageMeter(name) for name in ("loss", "top1", "top5")]
    model.eval()
    for batch in loader:
        images, target = (tensor.to(args.device) for tensor in batch)
        output = model(images)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        loss_meter.update(criterion(output, target), len(target))
        top1.update(acc1, len(target))
        top5.update(acc5, len(target))
    return report("validation", meters)["top1"]


def report(what, meters):
    values = {meter.name: meter.avg for meter in meters}
    log.info("%s  %s", what, "  ".join(f"{name} {value:.6f}" for name, value in values.items()))
    return values


def save_checkpoint(state, directory, is_best):
    torch.save(state, directory / "last.pt")
    if is_best:
        shutil.copyfile(directory / "last.pt", directory / "best.pt")


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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--print-freq", type=int, default=10)
    parser.add_argument("--evaluate", type=Path, help="validate this checkpoint, and train nothing")
    parser.add_argument("--out", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args.out.mkdir(parents=True, exist_ok=True)
    random.seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002  # as scripts do
    torch.manual_seed(args.seed)

    to_tensor = [
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
    train_set = datasets.ImageFolder(
        args.data / "train",
        transforms.Compose(
            [
                transforms.RandomResizedCrop(args.size),
                transforms.RandomHorizontalFlip(),
                *to_tensor,
            ]
        ),
    )
    val_set = datasets.ImageFolder(
        args.data / "val",
        transforms.Compose([transforms.Resize(args.size), *to_tensor]),
    )
    kwargs = {"batch_size": args.batch_size, "num_workers": args.workers}
    loader = DataLoader(train_set, shuffle=True, **kwargs)
    val_loader = DataLoader(val_set, **kwargs)

    norm = {"norm_layer": partial(nn.GroupNorm, 8)} if args.norm == "group" else {}
    net = models.get_model(args.arch, num_classes=len(train_set.classes), **norm).to(args.device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)

    if args.evaluate:
        state = torch.load(args.evaluate, map_location=args.device)
        net.load_state_dict(state["model"])
        validate(val_loader, net, criterion, args)
        return

    best = 0.0
    for epoch in range(args.epochs):
        train(loader, net, criterion, optimizer, epoch, args)
        top1 = validate(val_loader, net, criterion, args)
        scheduler.step()
        is_best, best = top1 > best, max(top1, best)
        state = {
            "epoch": epoch + 1,
            "arch": args.arch,
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "top1": top1,
        }
        save_checkpoint(state, args.out, is_best)


if __name__ == "__main__":
    main()

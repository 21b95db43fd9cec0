"""Train a small detector of colored boxes on images of different sizes, and evaluate it."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its name everywhere
from torch.utils.data import DataLoader, Dataset
from torchvision.ops import box_iou

CELL = 8  # pixels


class Boxes(Dataset):
    """Dark images of 32 to 64 pixels with one to three boxes in red, green or blue."""

    def __init__(self, length, seed):
        self.length, self.seed = length, seed

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(self.seed + index)
        height, width = torch.randint(32, 65, (2,), generator=random).tolist()
        image = 0.2 * torch.rand(3, height, width, generator=random)
        labels = torch.randint(3, (1 + index % 3,), generator=random)
        corners = torch.rand(len(labels), 2, generator=random) * torch.tensor([width, height]) / 2
        sizes = 8 + 8 * torch.rand(len(labels), 2, generator=random)
        boxes = torch.cat([corners, corners + sizes], dim=1)
        for (x, y, right, bottom), label in zip(boxes.int().tolist(), labels, strict=True):
            image[:, y:bottom, x:right] = F.one_hot(label, 3)[:, None, None]
        return image.to(torch.get_default_dtype()), {"boxes": boxes, "labels": labels}


def collate(samples):
    """Return the images of a batch and what is in them, as lists: no two have the same size."""
    return tuple(map(list, zip(*samples, strict=True)))


class Detector(nn.Module):
    """Says of each cell of an image which class it shows, if any, and how far that box goes."""

    def __init__(self, width=16):
        super().__init__()
        inner = [nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1)]
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), *inner, nn.ReLU())
        self.head = nn.Conv2d(width, 4 + 4, 1)  # nothing, red, green, blue; four sides

    def forward(self, images, targets=None):
        """Return the losses, as means of the images, or without targets what is in each."""
        cells = [self.head(self.body(image[None]))[0].flatten(1).T for image in images]
        middles = [centers(image) for image in images]
        if targets is None:
            return [self.boxes(*of) for of in zip(cells, middles, strict=True)]
        losses = [self.losses(*of) for of in zip(cells, middles, targets, strict=True)]
        return {name: torch.stack([of[name] for of in losses]).mean() for name in losses[0]}

    def losses(self, cells, middles, target):
        boxes = target["boxes"].to(cells.dtype)
        sides = torch.cat([middles[:, None] - boxes[:, :2], boxes[:, 2:] - middles[:, None]], 2)
        inside = sides.amin(dim=2) > 0  # a row for each cell, a column for each box
        has_box, box = inside.any(dim=1), inside.int().argmax(dim=1)
        labels = torch.where(has_box, target["labels"][box] + 1, 0)
        wanted = sides[torch.arange(len(box)), box] / CELL
        off = F.smooth_l1_loss(cells[:, 4:], wanted, reduction="none").sum(dim=1)
        return {
            "classes": F.cross_entropy(cells[:, :4], labels),
            "sides": (off * has_box).sum() / has_box.sum().clamp(min=1),
        }

    @staticmethod
    def boxes(cells, middles):
        labels, sides = cells[:, :4].argmax(dim=1), CELL * cells[:, 4:]
        boxes = torch.cat([middles - sides[:, :2], middles + sides[:, 2:]], dim=1)
        return {"boxes": boxes[labels > 0], "labels": labels[labels > 0] - 1}


def centers(image):
    """Return the middle of each cell of an image, as x and y."""
    rows, columns = (torch.arange(-(-n // CELL), device=image.device) for n in image.shape[1:])
    return torch.cartesian_prod(rows, columns).flip(1).to(image.dtype) * CELL + CELL / 2


def mean_loss(model, batch):
    losses = model(*batch)
    return sum(losses.values()), losses


@torch.no_grad()
def evaluate(model, loader):
    """Return the share of all boxes that are found: by half, and in the right color."""
    found = boxes = 0
    for images, targets in loader:
        for seen, true in zip(model(images), targets, strict=True):
            near = box_iou(true["boxes"], seen["boxes"]) > 0.5
            right = near & (true["labels"][:, None] == seen["labels"])
            found, boxes = found + int(right.any(dim=1).sum()), boxes + len(right)
    return found / boxes


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--images", type=int, default=512)
    args = parser.parse_args()
    torch.manual_seed(0)
    boxes = Boxes(args.images, 0)
    kwargs = {"batch_size": 16, "collate_fn": collate, "num_workers": 0}
    loader = DataLoader(boxes, **kwargs)
    tests = DataLoader(Boxes(52, 10**6), **kwargs)
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss, parts = mean_loss(model, batch)
            loss.backward()
            optimizer.step()
        values = "  ".join(f"{name} {value.item():.9f}" for name, value in parts.items())
        recall = evaluate(model, tests)
        text = f"epoch {epoch}: loss {loss.item():.9f}  {values}  recall {recall:.6f}"
        print(text)
    torch.save(model.state_dict(), "detect.pt")


if __name__ == "__main__":
    main()

"""Train a digit classifier on a stream of tar files, read in WebDataset's manner."""

import argparse
import io
import tarfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its name everywhere
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shards(IterableDataset):
    """The samples of tar files, `<key>.png` and `<key>.cls`, one of each file in turn."""

    def __init__(self, files, part=0, parts=1):
        """Read as many files as this part of a run is due, of so many parts."""
        super().__init__()
        self.files, self.part, self.parts = files, part, parts

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        files = self.files[self.part + self.parts * number :: self.parts * workers]
        with ExitStack() as stack:
            streams = [samples(stack.enter_context(tarfile.open(file))) for file in files]
            while streams:
                for stream in list(streams):
                    sample = next(stream, None)
                    if sample is None:
                        streams.remove(stream)
                    else:
                        yield decoded(sample)


def samples(tar):
    """Yield what lies side by side under one key, from a name's suffix to its bytes."""
    sample, last = {}, None
    for member in tar:
        key, _, suffix = member.name.partition(".")
        if key != last and sample:
            yield sample
            sample = {}
        sample[suffix], last = tar.extractfile(member).read(), key
    if sample:
        yield sample


def decoded(sample):
    pixels = np.asarray(Image.open(io.BytesIO(sample["png"])))
    return torch.tensor(pixels[None] / 255, dtype=torch.get_default_dtype()), int(sample["cls"])


def mean_loss(model, batch):
    images, labels = batch
    scores = model(images)
    right = (scores.argmax(dim=1) == labels).to(scores.dtype).mean()
    return F.cross_entropy(scores, labels), {"accuracy": right}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", type=Path, help="the folder of the tar files")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=60)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(0)
    shards = Shards(sorted(args.shards.glob("*.tar")))
    loader = DataLoader(shards, args.batch_size, num_workers=args.workers)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(args.epochs):
        losses, accuracies = [], []
        for batch in loader:
            optimizer.zero_grad()
            loss, metrics = mean_loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            accuracies.append(metrics["accuracy"].item())
        means = [np.mean(values) for values in (losses, accuracies)]
        print("epoch {}: loss {:.9f} accuracy {:.6f}".format(epoch, *means))
    torch.save(model.state_dict(), "tars.pt")


if __name__ == "__main__":
    main()

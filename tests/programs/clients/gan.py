"""Train a generative adversarial network on scikit-learn's handwritten digits."""

import argparse
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its name everywhere
from torch.utils.data import DataLoader, TensorDataset


def make_generator(latent):
    return nn.Sequential(
        nn.Linear(latent, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, 64),
        nn.Tanh(),
    )


def make_discriminator(dropout):
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.LeakyReLU(0.2),
        nn.Dropout(dropout),
        nn.Linear(128, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, 1),
    )


def with_noise(batch, latent):
    """Return the images of a batch, and noise to make as many of."""
    (images,) = batch
    return images, torch.randn(len(images), latent, device=images.device)


def judged(discriminator, images, verdict):
    """Return how far the discriminator is from giving its verdict on all the images."""
    scores = discriminator(images)
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, verdict))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--latent", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("gan.pt"))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)

    images = torch.Tensor(load_digits().data) / 8 - 1
    add_noise = partial(with_noise, latent=args.latent)
    loader = DataLoader(
        TensorDataset(images),
        args.batch_size,
        shuffle=True,
        drop_last=True,
    )
    generator = make_generator(args.latent).to(device)
    discriminator = make_discriminator(args.dropout).to(device)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.999))

    def d_loss_of(discriminator, batch):
        real, noise = batch
        with torch.no_grad():
            fake = generator(noise)
        return judged(discriminator, real, 1.0) + judged(discriminator, fake, 0.0)

    def g_loss_of(generator, batch):
        _, noise = batch
        return judged(discriminator, generator(noise), 1.0)

    for epoch in range(args.epochs):
        for batch in loader:
            batch = add_noise([tensor.to(device) for tensor in batch])  # noqa: PLW2901

            d_optimizer.zero_grad()
            d_loss = d_loss_of(discriminator, batch)
            d_loss.backward()
            d_optimizer.step()

            g_optimizer.zero_grad()
            discriminator.requires_grad_(False)
            g_loss = g_loss_of(generator, batch)
            g_loss.backward()
            discriminator.requires_grad_(True)
            g_optimizer.step()
        print(f"epoch {epoch + 1}: losses {d_loss:.9f} and {g_loss:.9f}")

    state = {"generator": generator.state_dict(), "discriminator": discriminator.state_dict()}
    torch.save(state, args.out)


if __name__ == "__main__":
    main()

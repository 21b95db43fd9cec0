"""Train a small character-level transformer on the lines of a text file, and let it write some."""

import argparse
import math
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its name everywhere
from torch.utils.data import DataLoader, Dataset

END = 0  # begins and ends a line
PAD = -100


class Lines(Dataset):
    """The lines of a file, as characters and the characters that follow."""

    def __init__(self, file):
        self.lines = file.read_text(encoding="utf-8").split("\n")
        self.lines = [line for line in self.lines if line]
        self.characters = sorted(set("".join(self.lines)))
        self.numbers = {character: i + 1 for i, character in enumerate(self.characters)}

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        line = [self.numbers[character] for character in self.lines[index]]
        return torch.tensor([END, *line]), torch.tensor([*line, END])

    def decode(self, numbers):
        return "".join(self.characters[number - 1] for number in numbers if number != END)


def collate(samples):
    """Pad the lines of a batch to the longest."""
    inputs, targets = zip(*samples, strict=True)
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return pad(inputs, padding_value=END), pad(targets, padding_value=PAD)


class Block(nn.Module):
    """Attention to what came before, and a perceptron, each added to its input."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.project(self.attention(self.norms[0](x))))
        return x + self.mlp(self.norms[1](x))

    def attention(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class CharModel(nn.Module):
    """Predicts each next character of a line."""

    def __init__(self, characters, length, dropout, *, width=32, heads=4, layers=2):
        super().__init__()
        self.length = length
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, numbers):
        positions = torch.arange(numbers.shape[1], device=numbers.device)
        x = self.dropout(self.characters(numbers) + self.positions(positions))
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def generate(self, device):
        """Write one line, character by character."""
        numbers = torch.full((1, 1), END, device=device)
        while numbers.shape[1] < self.length:
            probabilities = self(numbers)[:, -1].softmax(dim=-1)
            numbers = torch.cat([numbers, torch.multinomial(probabilities, 1)], dim=1)
            if numbers[0, -1] == END:
                break
        return numbers[0].tolist()


def token_loss(model, batch):
    """Return the mean loss over the characters of a batch; its padding does not count."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PAD)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("chars.pt"))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)

    lines = Lines(args.text)
    loader = DataLoader(
        lines,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
    )
    longest = max(map(len, lines.lines))
    model = CharModel(len(lines.characters) + 1, longest + 1, args.dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    model.train()
    for epoch in range(args.epochs):
        for batch in loader:
            batch = [tensor.to(device) for tensor in batch]  # noqa: PLW2901
            optimizer.zero_grad()
            loss = token_loss(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.9f}")

    model.eval()
    print("wrote:", *(lines.decode(model.generate(device)) for _ in range(5)))
    torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()

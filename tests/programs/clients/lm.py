"""Train a small GPT-2 of transformers on the sentences of a text file, and let it go on."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

END = 0  # ends a sentence; else tokens are bytes
IGNORED = -100


def sentences(file):
    """Return the lines of a file as tokens."""
    return [[*line.encode(), END] for line in file.read_text().splitlines() if line]


def collate(samples):
    """Pad the sentences of a batch to a multiple of 16 tokens: few shapes to compile for."""
    length = 16 * -(-max(map(len, samples)) // 16)
    padding = [[END] * (length - len(tokens)) for tokens in samples]
    batch = {
        "input_ids": [s + p for s, p in zip(samples, padding, strict=True)],
        "attention_mask": [[1] * len(s) + p for s, p in zip(samples, padding, strict=True)],
        "labels": [s + [IGNORED] * len(p) for s, p in zip(samples, padding, strict=True)],
    }
    return {name: torch.tensor(rows) for name, rows in batch.items()}


def token_loss(model, batch):
    """Return the mean loss over the tokens of a batch that follow another."""
    return model(**batch).loss


def tokens_of(batch):
    """Return over how many tokens the loss of a batch is a mean."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


@torch.no_grad()
def evaluate(model, loader, device):
    """Return the perplexity."""
    model.eval()
    loss = tokens = 0
    for batch in loader:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}  # noqa: PLW2901
        loss = loss + token_loss(model, batch) * tokens_of(batch)
        tokens += tokens_of(batch)
    model.train()
    return (loss / tokens).exp().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    lines = sentences(args.text)
    train, test = lines[len(lines) // 5 :], lines[: len(lines) // 5]
    kwargs = {"batch_size": args.batch_size, "collate_fn": collate, "num_workers": 0}
    loader = DataLoader(train, **kwargs, shuffle=True, drop_last=True)
    tests = DataLoader(test, **kwargs)
    shape = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    noise = {f"{part}_pdrop": args.dropout for part in ("resid", "embd", "attn")}
    ends = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
    model = GPT2LMHeadModel(GPT2Config(**shape, **noise, **ends)).to(device)
    model.loss_type = "ForCausalLM"  # or it warns that it takes this one
    if args.compile:
        model = torch.compile(model, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = args.epochs * len(loader)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=steps)
    for epoch in range(args.epochs):
        for batch in loader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}  # noqa: PLW2901
            optimizer.zero_grad()
            loss = token_loss(model, batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        perplexity = evaluate(model, tests, device)
        text = f"epoch {epoch}: loss {loss:.9f} norm {norm.item():.6f} perplexity {perplexity:.6f}"
        print(text)
    start = torch.tensor([lines[0][:3]], device=device)
    written = model.generate(start, max_new_tokens=20, do_sample=False)
    print("wrote:", bytes(written[0].tolist()).decode(errors="replace"))
    torch.save(model.state_dict(), "lm.pt")


if __name__ == "__main__":
    main()

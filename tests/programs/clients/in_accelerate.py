"""Train with Accelerate, in a loop of one's own that resumes from its last checkpoint."""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVERY = 2  # steps from one checkpoint to the next


def points(count):
    """Return points on a line, and on which side of its middle each is."""
    x = torch.linspace(-1, 1, count).unsqueeze(1)
    return TensorDataset(x, (x[:, 0] > 0).long())


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = nn.Linear(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(points(40), 8 // accelerator.num_processes, shuffle=True, drop_last=True)
    eval_loader = DataLoader(points(15), 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    eval_loader = accelerator.prepare(eval_loader)
    steps = [int(folder.name.removeprefix("step_")) for folder in Path().glob("step_*")]
    step = max(steps, default=0)
    if step:
        accelerator.load_state(f"step_{step}")
    for epoch in range(step // len(loader), 2):
        loader.set_epoch(epoch)
        skipped = step - epoch * len(loader)
        for x, y in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % EVERY == 0:
                accelerator.save_state(f"step_{step}")
        model.eval()
        right = 0
        for x, y in eval_loader:
            guess, y = accelerator.gather_for_metrics((model(x).argmax(1), y))  # noqa: PLW2901
            right += int((guess == y).sum())
        model.train()
        accelerator.print(f"epoch {epoch}: {right} of {len(eval_loader.dataset)} right")
    accelerator.end_training()


if __name__ == "__main__":
    main()

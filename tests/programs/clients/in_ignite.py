"""Train with Ignite's Engine, resuming from its last checkpoint."""

import os
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy
from torch import nn
from torch.utils.data import TensorDataset

EVERY = 2  # steps from one checkpoint to the next


def points(count):
    """Return points on a line, and on which side of its middle each is."""
    x = torch.linspace(-1, 1, count).unsqueeze(1)
    return TensorDataset(x, (x[:, 0] > 0).long())


def main(_local_rank):
    torch.manual_seed(0)
    model = idist.auto_model(nn.Linear(1, 2))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = idist.auto_dataloader(points(40), batch_size=8, shuffle=True, drop_last=True)
    eval_loader = idist.auto_dataloader(points(15), batch_size=4)

    def step(_engine, batch):
        model.train()
        x, y = batch
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    trainer = Engine(step)
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()})
    state = {"trainer": trainer, "model": model, "optimizer": optimizer}
    saver = Checkpoint(state, DiskSaver("checkpoints", require_empty=False), n_saved=None)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=EVERY), saver)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate():
        evaluator.run(eval_loader)
        if idist.get_rank() == 0:
            right = len(eval_loader.dataset) * evaluator.state.metrics["accuracy"]
            print(f"epoch {trainer.state.epoch - 1}: {right:.0f} of 15 right")

    saved = {int(file.stem.split("_")[-1]): file for file in Path("checkpoints").glob("*.pt")}
    if saved:
        Checkpoint.load_objects(state, torch.load(saved[max(saved)]))
    trainer.run(loader, max_epochs=2)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo" if "WORLD_SIZE" in os.environ else None) as parallel:
        parallel.run(main)

"""Train with Lightning's Trainer, resuming from its last checkpoint."""

import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVERY = 2  # steps from one checkpoint to the next


def points(count):
    """Return points on a line, and on which side of its middle each is."""
    x = torch.linspace(-1, 1, count).unsqueeze(1)
    return TensorDataset(x, (x[:, 0] > 0).long())


class Sides(lightning.LightningModule):
    """Tells on which side of the middle a point is."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def train_dataloader(self):
        per_process = 8 // self.trainer.world_size
        return DataLoader(points(40), batch_size=per_process, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(points(15), batch_size=4)

    def training_step(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.layer(x), y)

    def validation_step(self, batch):
        x, y = batch
        accuracy = (self.layer(x).argmax(1) == y).float().mean()
        self.log("accuracy", accuracy, batch_size=len(y), sync_dist=True)

    def on_validation_epoch_end(self):
        right = 15 * self.trainer.callback_metrics["accuracy"]
        self.print(f"epoch {self.current_epoch}: {right:.0f} of 15 right")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=2,
        callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=EVERY, save_last=True)],
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Sides(), ckpt_path="last")


if __name__ == "__main__":
    main()

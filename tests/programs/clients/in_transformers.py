"""Train with transformers' Trainer, resuming from its last checkpoint."""

import os
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers.trainer_utils import get_last_checkpoint

EVERY = 2  # steps from one checkpoint to the next


def points(count):
    """Return points on a line, and on which side of its middle each is."""
    x = torch.linspace(-1, 1, count).unsqueeze(1)
    return [{"x": point, "labels": int(point > 0)} for point in x]


class Sides(nn.Module):
    """Tells on which side of the middle a point is."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def count_right(found):
    right = found.predictions.argmax(1) == found.label_ids
    return {"right": int(right.sum()), "count": len(right)}


def main():
    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        "checkpoints",
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
        per_device_eval_batch_size=4,
        num_train_epochs=2,
        learning_rate=0.1,
        save_steps=EVERY,
        eval_strategy="epoch",
        disable_tqdm=True,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = transformers.Trainer(
        Sides(),
        arguments,
        train_dataset=points(40),
        eval_dataset=points(15),
        compute_metrics=count_right,
    )
    resumes = Path("checkpoints").exists()
    trainer.train(resume_from_checkpoint=get_last_checkpoint("checkpoints") if resumes else None)
    if trainer.is_world_process_zero():
        evaluations = [line for line in trainer.state.log_history if "eval_right" in line]
        for epoch, found in enumerate(evaluations):
            print(f"epoch {epoch}: {found['eval_right']} of {found['eval_count']} right")


if __name__ == "__main__":
    main()

"""A dataloader of one's own for torchtitan, which its configuration names."""

from dataclasses import dataclass

import torch
from torch.utils.data import DistributedSampler
from torchtitan.components import dataloader
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.trainer import Trainer

EVERY = 2  # steps from one checkpoint to the next


def points(count):
    """Return points on a line, and on which side of its middle each is."""
    x = torch.linspace(-1, 1, count).unsqueeze(1)
    return [({"input": point}, int(point > 0)) for point in x]


class Points(dataloader.ParallelAwareDataloader):
    """Points in an order of their own, again and again; to evaluate, once and in order."""

    @dataclass(kw_only=True, slots=True)
    class Config(dataloader.BaseDataLoader.Config):
        """How many there are, and whether they begin again."""

        count: int = 40
        infinite: bool = True

    def __init__(self, config, *, dp_world_size, dp_rank, **_kwargs):
        self.infinite = config.infinite
        data, size = points(config.count), 8 // dp_world_size
        sampler = DistributedSampler(data, dp_world_size, dp_rank, shuffle=config.infinite)
        ranks = {"dp_rank": dp_rank, "dp_world_size": dp_world_size}
        super().__init__(data, **ranks, batch_size=size, sampler=sampler)

    def __iter__(self):
        yield from super().__iter__()
        while self.infinite:
            yield from super().__iter__()


if __name__ == "__main__":
    checkpoint = CheckpointManager.Config(enable=True, interval=EVERY)
    Trainer.Config(dataloader=Points.Config(), checkpoint=checkpoint).build().train()

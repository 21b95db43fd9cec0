"""Rank, world size, launcher, device and logger of this process."""

from pardata.environment._logger import RankLogger, get_logger
from pardata.environment._world import World, world

__all__ = ["RankLogger", "World", "get_logger", "world"]

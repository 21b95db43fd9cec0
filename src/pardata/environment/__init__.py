"""Which process am I, who are the others, and how do I leave them a message?"""

from pardata.environment._logger import RankLogger, get_logger
from pardata.environment._world import World, world

__all__ = ["RankLogger", "World", "get_logger", "world"]

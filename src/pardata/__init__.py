"""Parallel-training utilities for PyTorch: the same script in one process and in many."""

from pardata.cache import CachedDataset, cache_dataset
from pardata.checkpoint import Checkpointer, Restored
from pardata.collectives import (
    StopSignal,
    all_gather,
    all_reduce_max,
    all_reduce_mean,
    all_reduce_min,
    all_reduce_sum,
    barrier,
    broadcast,
    rank_zero_call,
    rank_zero_first,
)
from pardata.data import Loader, Microbatches, Mixture, make_loader
from pardata.environment import RankLogger, World, get_logger, world
from pardata.environment._world import __version__ as __version__
from pardata.model import LoadedKeys, unwrap
from pardata.output import MetricWriter, Progress, progress
from pardata.process_group import init
from pardata.rng import seed_everything
from pardata.strategies import Mean, backward, check_in_sync, fingerprint, load_weights, wrap_model

__all__ = [
    "CachedDataset",
    "Checkpointer",
    "LoadedKeys",
    "Loader",
    "Mean",
    "MetricWriter",
    "Microbatches",
    "Mixture",
    "Progress",
    "RankLogger",
    "Restored",
    "StopSignal",
    "World",
    "all_gather",
    "all_reduce_max",
    "all_reduce_mean",
    "all_reduce_min",
    "all_reduce_sum",
    "backward",
    "barrier",
    "broadcast",
    "cache_dataset",
    "check_in_sync",
    "fingerprint",
    "get_logger",
    "init",
    "load_weights",
    "make_loader",
    "progress",
    "rank_zero_call",
    "rank_zero_first",
    "seed_everything",
    "unwrap",
    "world",
    "wrap_model",
]

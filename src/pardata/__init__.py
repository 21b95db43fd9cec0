"""Parallel-training utilities for PyTorch: the same script in one process and in many."""

from pardata.cache import cache_dataset as cache_dataset
from pardata.checkpoint import Checkpointer as Checkpointer
from pardata.collective import StopSignal as StopSignal
from pardata.collective import all_gather as all_gather
from pardata.collective import all_reduce_mean as all_reduce_mean
from pardata.collective import all_reduce_sum as all_reduce_sum
from pardata.collective import barrier as barrier
from pardata.collective import rank_zero_call as rank_zero_call
from pardata.collective import rank_zero_first as rank_zero_first
from pardata.data import Loader as Loader
from pardata.data import Microbatches as Microbatches
from pardata.data import make_loader as make_loader
from pardata.gradient import backward as backward
from pardata.launch import init as init
from pardata.model import check_in_sync as check_in_sync
from pardata.model import fingerprint as fingerprint
from pardata.model import load_weights as load_weights
from pardata.model import unwrap as unwrap
from pardata.model import wrap_model as wrap_model
from pardata.output import MetricWriter as MetricWriter
from pardata.output import progress as progress
from pardata.ranks import World as World
from pardata.ranks import get_logger as get_logger
from pardata.ranks import world as world
from pardata.ranks._version import __version__ as __version__
from pardata.seeds import seed_everything as seed_everything

__all__ = [
    "Checkpointer",
    "Loader",
    "MetricWriter",
    "Microbatches",
    "StopSignal",
    "World",
    "all_gather",
    "all_reduce_mean",
    "all_reduce_sum",
    "backward",
    "barrier",
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

"""Parallel-training utilities for PyTorch: the same script in one process and in many."""

from pardata._backward import backward as backward
from pardata._caching import cache_dataset as cache_dataset
from pardata._checkpoint import Checkpointer as Checkpointer
from pardata._collectives import all_gather as all_gather
from pardata._collectives import all_reduce_mean as all_reduce_mean
from pardata._collectives import all_reduce_sum as all_reduce_sum
from pardata._distribution import require_alone as _require_alone
from pardata._init import init as init
from pardata._loader import Loader as Loader
from pardata._loading import make_loader as make_loader
from pardata._logging import get_logger as get_logger
from pardata._metrics import MetricWriter as MetricWriter
from pardata._microbatches import Microbatches as Microbatches
from pardata._progress import progress as progress
from pardata._rank_zero import barrier as barrier
from pardata._rank_zero import rank_zero_call as rank_zero_call
from pardata._rank_zero import rank_zero_first as rank_zero_first
from pardata._seeding import seed_everything as seed_everything
from pardata._stop_signal import StopSignal as StopSignal
from pardata._unwrapping import unwrap as unwrap
from pardata._weights import check_in_sync as check_in_sync
from pardata._weights import fingerprint as fingerprint
from pardata._weights import load_weights as load_weights
from pardata._world import World as World
from pardata._world import world as world
from pardata._wrapping import wrap_model as wrap_model

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

__version__ = "0.1.0"

_require_alone()

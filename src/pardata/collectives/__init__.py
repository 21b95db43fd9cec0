"""Collectives that first compare the ranks' values; barrier, rank-0 sections, stop signal."""

from pardata.collectives._all_gather import all_gather, broadcast
from pardata.collectives._all_reduce import (
    all_reduce_max,
    all_reduce_mean,
    all_reduce_min,
    all_reduce_sum,
)
from pardata.collectives._barrier import barrier, rank_zero_call, rank_zero_first
from pardata.collectives._stop_signal import StopSignal

__all__ = [
    "StopSignal",
    "all_gather",
    "all_reduce_max",
    "all_reduce_mean",
    "all_reduce_min",
    "all_reduce_sum",
    "barrier",
    "broadcast",
    "rank_zero_call",
    "rank_zero_first",
]

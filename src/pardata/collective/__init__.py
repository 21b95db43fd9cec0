"""What all ranks do together; an error comes on all of them, a hang is told."""

from pardata.collective._exchange import all_gather, broadcast
from pardata.collective._rank_zero import barrier, rank_zero_call, rank_zero_first
from pardata.collective._reduction import (
    all_reduce_max,
    all_reduce_mean,
    all_reduce_min,
    all_reduce_sum,
)
from pardata.collective._stop_signal import StopSignal

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

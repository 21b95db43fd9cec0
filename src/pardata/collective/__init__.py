"""What all ranks do together; an error comes on all of them."""

from pardata.collective._rank_zero import barrier as barrier
from pardata.collective._rank_zero import rank_zero_call as rank_zero_call
from pardata.collective._rank_zero import rank_zero_first as rank_zero_first
from pardata.collective._reduction import all_gather as all_gather
from pardata.collective._reduction import all_reduce_mean as all_reduce_mean
from pardata.collective._reduction import all_reduce_sum as all_reduce_sum
from pardata.collective._stop_signal import StopSignal as StopSignal

__all__ = [
    "StopSignal",
    "all_gather",
    "all_reduce_mean",
    "all_reduce_sum",
    "barrier",
    "rank_zero_call",
    "rank_zero_first",
]

"""Progress bar and metrics file of rank 0."""

from pardata.output._metric_writer import MetricWriter
from pardata.output._progress import Progress, progress

__all__ = ["MetricWriter", "Progress", "progress"]

"""What a person sees of a run while it runs."""

from pardata.output._metric_writer import MetricWriter
from pardata.output._progress import Progress, progress

__all__ = ["MetricWriter", "Progress", "progress"]

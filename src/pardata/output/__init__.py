"""What a person sees of a run while it runs."""

from pardata.output._metric_writer import MetricWriter as MetricWriter
from pardata.output._progress import Progress as Progress
from pardata.output._progress import progress as progress

__all__ = ["MetricWriter", "Progress", "progress"]

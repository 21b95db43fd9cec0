"""The same global batches at every world size."""

from pardata.data._loader import Loader as Loader
from pardata.data._make_loader import make_loader as make_loader
from pardata.data._microbatches import Microbatches as Microbatches

__all__ = ["Loader", "Microbatches", "make_loader"]

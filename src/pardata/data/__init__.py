"""The same global batches at every world size."""

from pardata.data._loader import Loader
from pardata.data._make_loader import make_loader
from pardata.data._microbatches import Microbatches

__all__ = ["Loader", "Microbatches", "make_loader"]

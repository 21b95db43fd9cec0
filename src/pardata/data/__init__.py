"""The same global batches at every world size."""

from pardata.data._loader import Loader
from pardata.data._make_loader import make_loader
from pardata.data._microbatches import Microbatches
from pardata.data._mixture import Mixture

__all__ = ["Loader", "Microbatches", "Mixture", "make_loader"]

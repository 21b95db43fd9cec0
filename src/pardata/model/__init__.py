"""One model on many ranks: wrapped, read through, unwrapped, its weights in and out."""

from pardata.model._unwrap import unwrap
from pardata.model._weights import check_in_sync, fingerprint, load_weights
from pardata.model._wrap_model import wrap_model

__all__ = ["check_in_sync", "fingerprint", "load_weights", "unwrap", "wrap_model"]

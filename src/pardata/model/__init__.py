"""One model on many ranks: wrapped, read through, unwrapped, its weights in and out."""

from pardata.model._unwrap import unwrap as unwrap
from pardata.model._weights import check_in_sync as check_in_sync
from pardata.model._weights import fingerprint as fingerprint
from pardata.model._weights import load_weights as load_weights
from pardata.model._wrap_model import wrap_model as wrap_model

__all__ = ["check_in_sync", "fingerprint", "load_weights", "unwrap", "wrap_model"]

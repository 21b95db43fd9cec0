"""The strategies that keep replicas equal, and `backward`."""

from pardata.strategies._backward import backward
from pardata.strategies._step_metrics import Mean
from pardata.strategies._weights import check_in_sync, fingerprint, load_weights
from pardata.strategies._wrap_model import wrap_model

__all__ = ["Mean", "backward", "check_in_sync", "fingerprint", "load_weights", "wrap_model"]

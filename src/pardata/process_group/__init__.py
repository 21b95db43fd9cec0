"""Creates, adopts, watches and destroys the process group."""

from pardata.process_group._init import init as init

__all__ = ["init"]

"""Join the group of whatever launched this process, and leave it well."""

from pardata.launch._init import init as init

__all__ = ["init"]

"""The scripts here are programs: the tests start them, and nothing imports them."""

collect_ignore_glob = ["in_*.py", "watched.py"]

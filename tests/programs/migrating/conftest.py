"""The scripts here are programs: a test starts them, and nothing imports them."""

collect_ignore_glob = ["*_before.py", "*_after.py"]

"""The experiments: rows that `multinode.py` collects, and the studies that `bireme study` runs on emulated nodes."""

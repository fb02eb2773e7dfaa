"""Watches a training loop: the only place that touches process groups, /proc and CUDA events."""

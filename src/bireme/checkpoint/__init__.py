"""Checkpoints: sharded, written in the background, whole or not there at all; resumed on any number of ranks."""

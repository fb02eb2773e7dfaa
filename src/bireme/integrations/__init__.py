"""Callbacks that put a Monitor into other people's trainers; each imports its library, and nothing else does."""

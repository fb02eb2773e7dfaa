"""What Bireme logs while something runs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is logged meanwhile."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bireme").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("bireme").removeHandler(handler)

"""Bireme: multi-node PyTorch training that accounts for every millisecond of every step."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Monitor", "__version__", "observe_nothing"]

if TYPE_CHECKING:
    from bireme.observe.monitor import Monitor
    from bireme.observe.nothing import observe_nothing


def __getattr__(name: str) -> Any:
    # Late, so that `import bireme` and `bireme --help` do not wait for torch.
    if name == "Monitor":
        from bireme.observe.monitor import Monitor

        return Monitor
    if name == "observe_nothing":
        from bireme.observe.nothing import observe_nothing

        return observe_nothing
    raise AttributeError(f"module 'bireme' has no attribute {name!r}")

"""How long a rank waits for an answer before it takes the others for lost."""

from collections.abc import Mapping

from bireme.environment import UNSHAPED
from bireme.layout import Layout
from bireme.nodes import parse_rate
from bireme.world import positive_seconds

_SILENT_S = 20.0  # with what it takes to find out who is silent, half a minute


def silence_limit_s(
    environ: Mapping[str, str], num_parameters: int, layout: Layout, slowest_delay_ms: float
) -> float | None:
    """After how long without an answer a rank takes the others for lost; None: PyTorch's 30 minutes.

    BIREME_TIMEOUT_S says it. On emulated nodes it is 20 s, 40 s with a pipeline, and what slow links and planted delays
    explain.
    """
    given = environ.get("BIREME_TIMEOUT_S")
    if given:
        return positive_seconds("BIREME_TIMEOUT_S", given)
    if not environ.get("BIREME_NODE"):
        return None
    link = environ.get("BIREME_LINK", UNSHAPED)
    bits_per_s = None if link == UNSHAPED else parse_rate(link)
    gradients_s = num_parameters * 4 * 8 / bits_per_s if bits_per_s else 0.0
    # A stage waits for what others compute, too.
    silent_s = _SILENT_S * (2 if layout.pp > 1 else 1)
    return silent_s + 10 * gradients_s + slowest_delay_ms / 1e3

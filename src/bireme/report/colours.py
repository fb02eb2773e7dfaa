"""One colour for each state, in the terminal and in plots: Okabe and Ito's, which the colour-blind tell apart."""

COMPUTE = "#0072B2"  # blue
CONTENTION = "#E69F00"  # orange
TRANSFER = "#009E73"  # green
WAIT = "#D55E00"  # vermilion
OTHER = "#999999"  # grey
ACCENT = "#CC79A7"  # purple: not a state

STATE_COLOURS = {
    "running": COMPUTE,
    "runnable": CONTENTION,
    "transfer": TRANSFER,
    "wait": WAIT,
    "blocked": OTHER,
}

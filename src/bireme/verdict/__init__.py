"""Whom to blame for slow steps, with evidence and what a cure is worth: pure functions of recorded ledgers."""

"""What the cells of a study of layouts come to: the fastest, what HSDP saves, how far the formula holds. Pure."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from bireme.report.resources import unknown

_Object = dict[str, Any]


def compare_layouts(cells: Sequence[_Object]) -> _Object:
    """What the table does not say by itself: the fastest layout of each place and link; HSDP against FSDP; and between
    what bounds the counted bytes are of the formula's. `cells`: entries of the study's results."""
    done = [each for each in cells if each["status"] == "finished"]
    fastest, saving = [], []
    for where, group in _places(done):
        best = min(group, key=lambda each: float(each["step_ms"]["median"]))
        fastest.append({**where, "layout": best["axes"]["layout"], "step_ms": best["step_ms"]["median"]})
        by_layout = {each["axes"]["layout"]: each for each in group}
        if {"hsdp", "fsdp"} <= set(by_layout):
            saving.append({**where, **_against(by_layout["hsdp"], by_layout["fsdp"])})
    ratios = [each["counted_over_formula"] for each in done if each["counted_over_formula"] is not None]
    result: _Object = {"fastest": fastest, "hsdp_over_fsdp": saving}
    if not ratios:
        return result | unknown(["counted_over_formula"], "no cell has both")
    return result | {"counted_over_formula": {"min": min(ratios), "max": max(ratios), "cells": len(ratios)}}


def _places(done: Sequence[_Object]) -> Iterator[tuple[_Object, list[_Object]]]:
    """The cells of each number of ranks and each link: what layouts are compared within."""

    def place(entry: _Object) -> tuple[int, int, str]:
        return entry["axes"]["nodes"], entry["axes"]["ranks_per_node"], entry["link"]

    for (nodes, ranks, link), group in groupby(done, place):
        yield {"nodes": nodes, "ranks_per_node": ranks, "link": link}, list(group)


def _against(one: _Object, other: _Object) -> _Object:
    """Step and bytes of one cell over those of another."""
    result = {"step": one["step_ms"]["median"] / other["step_ms"]["median"]}
    for name in ("counted_link_bytes", "formula_link_bytes"):
        if one[name] is None or not other[name]:
            result |= unknown([name], one.get(f"{name}_reason") or other.get(f"{name}_reason") or "nothing crosses")
        else:
            result[name] = one[name] / other[name]
    return result

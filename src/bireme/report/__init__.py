"""Reports of a run: for programs (JSON), for the terminal, and two runs side by side. Imports stay cheap here."""

import sys
from pathlib import Path

from bireme.errors import UserError


def report_command(paths: list[Path], as_json: bool, links: Path | None = None) -> None:
    """`bireme report RUN [OTHER] [--json] [--links FILE]`: print the report of one run, or of two compared.

    Raises UserError for none or more than two runs, and for what is no run or has no measured step yet.
    """
    if not 1 <= len(paths) <= 2:
        raise UserError(f"bireme report takes one run directory, or two to compare, not {len(paths)}")

    import orjson
    from rich.console import Console

    from bireme.links import LinkTable
    from bireme.report.compare import compare, render_comparison
    from bireme.report.summary import summarise
    from bireme.report.terminal import render
    from bireme.run_reader import read_run

    table = LinkTable.load(links) if links is not None else None
    runs = [read_run(path) for path in paths]
    result = summarise(runs[0], links=table) if len(runs) == 1 else compare(runs[0], runs[1], links=table)
    if as_json:
        sys.stdout.write(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode() + "\n")
    elif len(runs) == 1:
        render(result, runs[0], Console())
    else:
        render_comparison(result, runs[0], runs[1], Console())

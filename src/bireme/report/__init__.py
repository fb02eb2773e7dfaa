"""Reports of a run, or of two: for programs (JSON), for the terminal, and as a page. Imports stay cheap here."""

import sys
from pathlib import Path

from bireme.errors import UserError


def report_command(
    paths: list[Path],
    as_json: bool,
    links: Path | None = None,
    html: bool = False,
    out: Path | None = None,
    open_it: bool = False,
) -> None:
    """`bireme report RUN [OTHER] [--json] [--links FILE]`: print the report of one run, or of two compared; with `html`
    write it as a page (also that of a study's folder) to `out`, and open it.

    Raises UserError for none or more than two runs, and for what is no run or has no measured step yet.
    """
    if not 1 <= len(paths) <= 2:
        raise UserError(f"bireme report takes one run directory, or two to compare, not {len(paths)}")
    if as_json and sys.stdout is None:
        raise UserError("standard output is closed: there is nowhere to print the report")
    if html:
        if as_json:
            raise UserError("--json and --html are two reports: ask for one at a time")
        from bireme.report.html import html_command

        html_command(paths, links, out, open_it)
        return
    if out is not None or open_it:
        raise UserError(f"{'--out' if out is not None else '--open'} belongs to the page: add --html")

    import orjson
    from rich.console import Console

    from bireme.links import LinkTable
    from bireme.report.compare import compare, render_comparison
    from bireme.report.summary import summarise
    from bireme.report.terminal import render
    from bireme.run_reader import read_run, uncollected

    with uncollected():
        table = LinkTable.load(links) if links is not None else None
        runs = [read_run(path) for path in paths]
        result = summarise(runs[0], links=table) if len(runs) == 1 else compare(runs[0], runs[1], links=table)
    if as_json:
        sys.stdout.write(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode() + "\n")
    elif len(runs) == 1:
        render(result, runs[0], Console())
    else:
        render_comparison(result, runs[0], runs[1], Console())

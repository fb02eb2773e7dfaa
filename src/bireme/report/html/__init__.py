"""`bireme report ... --html`: a run, two runs or a study as one page that works offline."""

from pathlib import Path
from typing import Any

from bireme.errors import UserError

REPORT_FILE = "report.html"


def html_command(paths: list[Path], links: Path | None, out: Path | None, open_it: bool) -> Path:
    """Writes the page and prints its path. UserError for what is no run or study, for what cannot be written, and,
    with `open_it`, where there is no browser (the page is there nevertheless)."""
    from bireme.files import not_a_link
    from bireme.report.html.write import write_page
    from bireme.run_reader import uncollected

    with uncollected():
        page, default = _page(paths, links)
        path = out if out is not None else not_a_link(default)
        write_page(page, path)
    print(path)
    if open_it:
        open_page(path)
    return path


def open_page(path: Path) -> None:
    """UserError where there is no browser to open it: what was asked for did not happen."""
    import webbrowser

    if not webbrowser.open(path.resolve().as_uri()):
        raise UserError(f"{path} is written, but no browser was found: open it yourself")


def _page(paths: list[Path], links: Path | None) -> tuple[dict[str, Any], Path]:
    """The page's numbers, and where it goes if not told."""
    from bireme.links import LinkTable
    from bireme.report.compare import compare
    from bireme.report.html.compare_numbers import compare_page
    from bireme.report.html.numbers import run_page
    from bireme.report.html.study_numbers import is_study, study_page
    from bireme.report.summary import summarise
    from bireme.run_reader import read_run

    studies = [path for path in paths if is_study(path)]
    if studies:
        if len(paths) > 1 or links is not None:
            raise UserError(f"{studies[0]} is a study: it is shown by itself, without other runs and without --links")
        return study_page(paths[0]), paths[0] / REPORT_FILE
    table = LinkTable.load(links) if links is not None else None
    runs = [read_run(path) for path in paths]
    if len(runs) == 1:
        return run_page(runs[0], summarise(runs[0], links=table), table), paths[0] / REPORT_FILE
    a, b = runs
    name = a.directory.resolve().name or "root"
    return compare_page(a, b, compare(a, b, links=table)), paths[1] / f"report-against-{name}.html"

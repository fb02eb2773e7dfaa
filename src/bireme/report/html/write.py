"""A page as one file: template, style, scripts (Plotly's too) and numbers; nothing is loaded from elsewhere."""

from pathlib import Path
from typing import Any

import orjson

from bireme.errors import UserError
from bireme.files import written_whole

_HERE = Path(__file__).parent

# A script ends at the first "</", whatever stands around it; U+2028 and U+2029 end a line of a script.
_IN_A_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def embedded_json(value: Any) -> str:
    """JSON that can stand in a script element of a page, whatever its strings say."""
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # a path that is no UTF-8
        text = orjson.dumps(_utf8(value)).decode()
    for character, escape in _IN_A_SCRIPT.items():
        text = text.replace(character, escape)
    return text


def _utf8(value: Any) -> Any:
    if isinstance(value, dict):
        return {_utf8(key): _utf8(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_utf8(each) for each in value]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def render(page: dict[str, Any]) -> str:
    """The page's HTML. `page["kind"]` chooses the template: run, compare or study."""
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = get_plotlyjs().replace("</script", "<\\/script")
    return environment.get_template(f"{page['kind']}.html.j2").render(
        page=page,
        numbers=Markup(embedded_json(page)),
        css=Markup((_HERE / "page.css").read_text()),
        plotly=Markup(script),
        script=Markup("\n".join((_HERE / name).read_text() for name in ("page.js", "charts.js"))),
    )


def write_page(page: dict[str, Any], path: Path) -> None:
    """Writes the page, whole or not at all. UserError where the file cannot be written."""
    text = render(page).encode("utf-8", "replace")
    try:
        with written_whole(path) as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}: choose another --out FILE") from None

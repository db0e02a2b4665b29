"""HTML pages from templates. A page contains its pictures and loads nothing."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import jinja2

from ..data.disk import atomic_path

__all__ = ["write_html"]


def write_html(template: str, path: Path, **values: Any) -> None:
    """Write the page of a template in ``templates/``, atomically; a missing folder is created. Local.

    Parameters
    ----------
    values
        Variables of the template. Texts are escaped; pictures are paths of PNG files, which the page will contain.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("halograd.report"),
        autoescape=True,
        # A misspelled variable is an error, instead of an empty text.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda picture: base64.b64encode(picture.read_bytes()).decode("ascii")
    text = environment.get_template(template).render(values)
    with atomic_path(path, parents=True) as partial:
        partial.write_text(text, encoding="utf-8")

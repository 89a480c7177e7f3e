"""A hook of mkdocs: the page "One sample through the code" links each name to its line.

The files that the page names become pages of the site, with an anchor for each line. They are made while the site is
built, so no line number is written down.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGE = "one_sample.md"
_ROOT = Path(__file__).parents[1]
_SOURCE = _ROOT / "src" / "rillflow"
_ROW = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


def named() -> list[tuple[str, str]]:
    """Return the files and names of the page, in its order."""
    return _ROW.findall((_ROOT / "docs" / PAGE).read_text())


def line_of(file: str, name: str) -> int:
    """Return the line at which a function, class or method (`Class.method`) of a file begins."""
    body: list[ast.stmt] = ast.parse((_SOURCE / file).read_text()).body
    line = 0
    for part in name.split("."):
        found = next((node for node in body if getattr(node, "name", None) == part), None)
        if found is None:
            raise ValueError(f"docs/{PAGE} names {name}, which {file} does not have")
        line, body = found.lineno, getattr(found, "body", [])
    return line


def on_files(files: Files, *, config: MkDocsConfig, **_: Any) -> Files:
    for file in sorted({file for file, _ in named()}):
        code = (_SOURCE / file).read_text()
        content = f"# {file}\n\n~~~~python linenums='1'\n{code}~~~~\n"
        files.append(File.generated(config, _page_of(file), content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    if page.file.src_uri != PAGE:
        return markdown
    return _ROW.sub(lambda row: _linked(row[1], row[2]), markdown)


def _page_of(file: str) -> str:
    return f"source/{file.removesuffix('.py')}.md"


def _linked(file: str, name: str) -> str:
    page = _page_of(file)
    # The anchors of pymdownx.highlight: the first block of code of a page, and its lines.
    return f"| [`{file}`]({page}) | [`{name}`]({page}#__codelineno-0-{line_of(file, name)}) |"

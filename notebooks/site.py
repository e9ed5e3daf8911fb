"""The pages of the site that lie elsewhere in the repository: README, results and changelog (a hook of MkDocs)."""

import posixpath
import re
from html import unescape
from pathlib import Path
from typing import Any

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "index.md": "README.md",
    "results.md": "benchmarks/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
PAGE_OF = {source: page for page, source in PAGES.items()}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)#\s]+")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links between files of the repository, turned into links between pages."""
    own = page.file.src_uri
    return _LINK.sub(lambda link: _on_site(link[0], own, PAGES.get(own, f"notebooks/{own}")), markdown)


def _on_site(link: str, page: str, source: str) -> str:
    """Where a link of the file `source`, which is this page, leads on the site."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    name = PAGE_OF.get(target, target.removeprefix("notebooks/") if target.startswith("notebooks/") else None)
    return link if name is None else posixpath.relpath(name, posixpath.dirname(page))


def on_page_content(html: str, **_: Any) -> str:
    """Formulas as MathML, which browsers show without a script; names of functions without Sphinx's roles."""
    html = re.sub(r":(func|class|meth|mod):(?=\s*<code>)", "", html)
    html = re.sub(
        r'<span class="arithmatex">\\\((.*?)\\\)</span>', lambda found: _math(found, "inline"), html, flags=re.S
    )
    return re.sub(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', lambda found: _math(found, "block"), html, flags=re.S)


def _math(found: re.Match[str], display: str) -> str:
    return latex2mathml.converter.convert(unescape(found[1]).strip(), display=display)

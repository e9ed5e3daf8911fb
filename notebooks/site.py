"""The pages of the site that lie elsewhere in the repository: README, results and changelog (a hook of MkDocs)."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {
    "index.md": "README.md",
    "results.md": "benchmarks/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
# Links as the pages have them, and as the site does.
LINKS = {
    "(../notebooks/": "(",
    "(notebooks/": "(",
    "(benchmarks/README.md)": "(results.md)",
    "(CONTRIBUTING.md)": "(contributing.md)",
    "(CHANGELOG.md)": "(changelog.md)",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, with their links turned."""
    for page, source in PAGES.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        for link, turned in LINKS.items():
            content = content.replace(link, turned)
        files.append(File.generated(config, page, content=content))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Formulas as MathML, which browsers show without a script; names of functions without Sphinx's roles."""
    html = re.sub(r":(func|class|meth|mod):(?=\s*<code>)", "", html)
    html = re.sub(
        r'<span class="arithmatex">\\\((.*?)\\\)</span>', lambda found: _math(found, "inline"), html, flags=re.S
    )
    return re.sub(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', lambda found: _math(found, "block"), html, flags=re.S)


def _math(found: re.Match[str], display: str) -> str:
    return latex2mathml.converter.convert(unescape(found[1]).strip(), display=display)

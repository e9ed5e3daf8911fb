"""The pages of the site that lie elsewhere in the repository: README, results and changelog (a hook of MkDocs)."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"index.md": "README.md", "results.md": "benchmarks/README.md", "changelog.md": "CHANGELOG.md"}
# Links as the pages have them, and as the site does.
LINKS = {"(../notebooks/": "(", "(notebooks/": "(", "(benchmarks/README.md)": "(results.md)"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, with their links turned."""
    for page, source in PAGES.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        for link, turned in LINKS.items():
            content = content.replace(link, turned)
        files.append(File.generated(config, page, content=content))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name functions and classes as Sphinx would have it; only the name is shown."""
    return re.sub(r":(func|class|meth|mod):(?=\s*<code>)", "", html)

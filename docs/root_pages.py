"""Adds PERF.md and CONTRIBUTING.md from the top of the tree to the documentation site.

Pages have links to other pages and files by their paths in the tree. On the site, a link to a page
leads to the page, and a link to another file becomes its name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("PERF.md", "CONTRIBUTING.md")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+|docs/)?([\w./-]+)(#[\w-]+)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the top of the tree to those of ``docs/``."""
    for name in PAGES:
        content = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the page's text with links for the site."""
    is_of_root = page.file.src_uri in PAGES
    depth = page.file.src_uri.count("/")

    def site_link(link: re.Match[str]) -> str:
        text, above, path, anchor = link.groups(default="")
        is_above_docs = not is_of_root and above == "../" * (depth + 1)
        if above == "docs/" or (is_above_docs and path in PAGES):
            return f"[{text}]({'../' * depth}{path}{anchor})"
        if is_above_docs or (is_of_root and path not in PAGES):
            return text if " " in text else f"`{path}`"
        return link.group()

    return _LINK.sub(site_link, markdown)

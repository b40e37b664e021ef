"""Hook of MkDocs: pages may link to files of the repository that stand outside docs/.

A page links to `../schemas/topics.toml` as it does on a code-hosting site. The hook copies each
file that a page links to into `repository/` of the site and points the link there. A Markdown file
becomes a page, and its own links are followed. A link to a path that does not exist is left as it
is, so that MkDocs reports it.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FOLDER = "repository/"
LINK = re.compile(r"(\]\(|<img src=\")([^)\s\"#:]+)((?:#[^)\s\"]*)?)(?=[)\"])")


def repository_path(src_uri: str) -> str:
    """Returns the path in the repository of a file of the site."""
    return src_uri.removeprefix(FOLDER) if src_uri.startswith(FOLDER) else f"docs/{src_uri}"


def site_path(path: str) -> str:
    """Returns the path in the site of a repository's file: the inverse of `repository_path`."""
    return path.removeprefix("docs/") if path.startswith("docs/") else FOLDER + path


def outside_code(markdown: str) -> list[tuple[str, bool]]:
    """Returns the lines of a page, each with whether it is prose; code blocks have no links."""
    lines: list[tuple[str, bool]] = []
    in_code = False
    for line in markdown.splitlines(keepends=True):
        fence = line.lstrip().startswith("```")
        lines.append((line, not in_code and not fence))
        in_code ^= fence
    return lines


def linked_file(link: str, path: str) -> str | None:
    """Returns the repository's path of the file that the page at `path` links to, if any."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return target if (ROOT / target).is_file() else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files outside docs/ that pages link to, also from pages that are added here."""
    pages = [repository_path(file.src_uri) for file in files if file.is_documentation_page()]
    while pages:
        page = pages.pop()
        prose = (line for line, is_prose in outside_code((ROOT / page).read_text()) if is_prose)
        targets = {linked_file(match[2], page) for line in prose for match in LINK.finditer(line)}
        for target in sorted(filter(None, targets)):
            uri = site_path(target)
            if uri not in files.src_uris:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
                if target.endswith(".md"):
                    pages.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 (MkDocs passes all)
    """Points links that leave docs/ to the copies, relative to the page."""
    path = repository_path(page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri) or "."

    def rewritten(match: re.Match[str]) -> str:
        target = linked_file(match[2], path)
        return match[0] if target is None else match[1] + os.path.relpath(site_path(target), here) + match[3]

    return "".join(
        LINK.sub(rewritten, line) if is_prose else line for line, is_prose in outside_code(markdown)
    )

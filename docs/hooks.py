"""Hooks of mkdocs.yml: links to files of the repository outside docs/ become pages of the site, and are checked.

The pages of docs/ are written for readers of the repository, too: they link to `../benchmarks/results/...` and begin
lists without a blank line before. Here such files join the site under `repo/` (Markdown as a page, source as a page
that shows it, anything else as it is), and what Python's Markdown needs is put in. A link to a file that does not exist
is a warning, an error under --strict.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
SHOWN_AS_SOURCE = {".py": "python", ".sh": "bash", ".toml": "toml", "": "text"}
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^\s*(```|~~~)")
LIST_ITEM = re.compile(r"^([-*]|\d+\.) ")
EXTERNAL_ASSET = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?(https?:)?//[^>]*>""")
log = logging.getLogger("mkdocs.hooks.repository_links")


def on_files(files: Files, config: Any) -> Files:
    """Adds each file outside docs/ that a page links to, and what those link to in turn."""
    to_read = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    added: set[str] = set()
    while to_read:
        page, text = to_read.pop()
        for target in _repository_links(page, text):
            if target in added:
                continue
            if not (ROOT / target).is_file():
                log.warning(f"{page}: expected a link to a file, got '{target}', which is none. Correct the link.")
                continue
            added.add(target)
            files.append(_as_file(target, config))
            if target.endswith(".md"):
                to_read.append((target, (ROOT / target).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with links that lead to where the files are in the site."""
    place = page.file.src_uri
    if place.startswith("repo/") and not (ROOT / place.removeprefix("repo/")).is_file():
        return markdown  # shows a source file
    origin = place.removeprefix("repo/") if place.startswith("repo/") else f"docs/{place}"

    def moved(match: re.Match[str]) -> str:
        target, hash_sign, anchor = match[2].partition("#")
        path = _resolve(origin, target)
        if path is None or (origin.startswith("docs/") and path.startswith("docs/")):
            return match[0]
        there = posixpath.relpath(_uri(path), posixpath.dirname(place) or ".")
        return f"{match[1]}{there}{hash_sign}{anchor}{match[3]}"

    parts = [text if in_code else LINK.sub(moved, text) for text, in_code in _parts(markdown)]
    return "\n".join(_with_blank_lines("\n".join(parts)))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Nothing is loaded from another host."""
    for match in EXTERNAL_ASSET.finditer(output):
        if 'rel="canonical"' not in match[0]:
            log.warning(f"{page.file.src_uri}: expected assets of this site only, got {match[0]}. Remove it.")
    return output


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it is part of a code block."""
    in_code = False
    for line in text.split("\n"):
        if FENCE.match(line):
            in_code = not in_code
            yield line, True
        else:
            yield line, in_code


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """Runs of lines that are all code, or none: a link may go over two lines."""
    for in_code, lines in groupby(_lines(text), key=lambda line: line[1]):
        yield "\n".join(line for line, _ in lines), in_code


def _with_blank_lines(text: str) -> Iterator[str]:
    """A blank line before a list or a table that follows a paragraph, as GitHub reads it without."""
    before = ""
    for line, in_code in _lines(text):
        is_text = bool(before.strip()) and not before.startswith((" ", "|", "#", "```", "<"))
        starts_list = LIST_ITEM.match(line) and not LIST_ITEM.match(before)
        starts_table = line.startswith("|")
        if not in_code and is_text and (starts_list or starts_table):
            yield ""
        yield line
        before = line


def _resolve(origin: str, target: str) -> str | None:
    """The path in the repository that a link of the page `origin` leads to; None: it leads elsewhere."""
    if not target or re.match(r"[a-z]+:|/", target):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def _repository_links(origin: str, text: str) -> Iterator[str]:
    for part, in_code in _parts(text):
        for match in () if in_code else LINK.finditer(part):
            path = _resolve(origin, match[2].partition("#")[0])
            if path is not None and not path.startswith("docs/"):
                yield path


def _uri(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repo/{path}.md" if Path(path).suffix in SHOWN_AS_SOURCE else f"repo/{path}"


def _as_file(path: str, config: Any) -> File:
    language = SHOWN_AS_SOURCE.get(Path(path).suffix)
    where: dict[str, Any] = {"abs_src_path": str(ROOT / path)}
    if language is not None:
        where = {"content": f"# {path}\n\n````{language}\n{(ROOT / path).read_text()}\n````\n"}
    return File.generated(config, _uri(path), inclusion=InclusionLevel.NOT_IN_NAV, **where)

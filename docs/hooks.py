"""What the site needs beyond its generator: where the callbacks lie, and links that lead out of docs/."""

from __future__ import annotations

import posixpath
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")
_copy = tempfile.TemporaryDirectory(prefix="hiremate-docs-")


@event_priority(100)  # before mkdocstrings reads its settings
def on_config(config: Any) -> Any:
    """Let docstrings be read from a copy in which the callbacks lie where an installed package has them."""
    package = Path(_copy.name) / "hiremate_lightning"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "hiremate_lightning", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "callbacks", package / "callbacks", ignore=shutil.ignore_patterns("__pycache__"))
    handlers = config.plugins["mkdocstrings"].config.handlers
    handlers["python"]["paths"] = [_copy.name]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links that leave docs/ to the repository; where the site knows none, leave their words."""

    def lead(link: re.Match[str]) -> str:
        words, path = link[1], posixpath.normpath(posixpath.join("docs", link[2]))
        return f"[{words}]({config.repo_url}/blob/main/{path})" if config.repo_url else words

    return OUTSIDE_LINK.sub(lead, markdown)

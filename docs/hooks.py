"""What the site needs beyond its generator: where the callbacks lie, links that lead out of docs/, and the notebook."""

from __future__ import annotations

import json
import posixpath
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

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


def on_files(files: Files, config: Any) -> Files:
    """Make a page of each notebook, which stays beside it as a file to run."""
    for path in sorted(Path(config.docs_dir).glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n\n".join(part for cell in cells for part in _parts_of(cell))
        note = f"*This page is a notebook: [{path.name}]({path.name}).*"
        files.append(File.generated(config, path.with_suffix(".md").name, content=f"{text}\n\n{note}\n"))
    return files


def _parts_of(cell: dict[str, Any]) -> Iterator[str]:
    """Write one cell of a notebook as Markdown: its text, or its code and what that has printed and drawn."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/svg+xml" in data:
            picture = "".join(data["image/svg+xml"])
            yield f'<div markdown="0">{re.sub(r"<[?!][^>]*>", "", picture).strip()}</div>'
        else:
            printed = "".join(output.get("text") or data["text/plain"]).rstrip()
            yield f"```text\n{printed}\n```"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links that leave docs/ to the repository; where the site knows none, leave their words."""

    def lead(link: re.Match[str]) -> str:
        words, path = link[1], posixpath.normpath(posixpath.join("docs", link[2]))
        return f"[{words}]({config.repo_url}/blob/main/{path})" if config.repo_url else words

    is_notebook = page.file.generated_by is not None
    pages = markdown if is_notebook else markdown.replace(".ipynb)", ".md)")
    return OUTSIDE_LINK.sub(lead, pages)

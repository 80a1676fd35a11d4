"""The package as it installs, and the files that a stranger meets first."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import hiremate_lightning
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hiremate_lightning"
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
SCRIPTS = ("setup", "lint", "typecheck", "test", "test-install", "test-latest", "test-oldest")
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")


def listed(key: str) -> set[str]:
    """Read the strings of a list in pyproject.toml; Python 3.10 has no reader of TOML."""
    block = re.search(rf"^{key} = \[(.*?)\]$", PYPROJECT, flags=re.DOTALL | re.MULTILINE)
    assert block is not None, key
    return set(re.findall(r'"([^"]+)"', block[1]))


def test_every_subpackage_is_listed_by_name() -> None:
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")}

    assert listed("packages") == found | {"hiremate_lightning.callbacks"}


def test_what_is_loaded_when_asked_for_is_shown_to_type_checkers() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    imports = (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level)
    shown = {alias.name: node.module for node in imports for alias in node.names if node.module != "errors"}

    assert shown == hiremate_lightning._LAZY
    assert set(hiremate_lightning.__all__) > set(shown)


def test_the_callbacks_import_from_anywhere(tmp_path: Path) -> None:
    """Of the copy of the package that stands first on Python's path; test_random_states.py imports them."""
    place = "from importlib.util import find_spec as f; print(f('hiremate_lightning.callbacks').origin)"
    for top in (ROOT, tmp_path):
        result = run_python("-c", place, cwd=tmp_path)
        assert Path(result.stdout.strip()) == top / "callbacks" / "__init__.py", result.stderr
        for folder in (PACKAGE, ROOT / "callbacks"):
            shutil.copytree(folder, tmp_path / folder.name, dirs_exist_ok=True)


def test_the_callbacks_are_never_a_second_copy() -> None:
    result = run_python("-c", "import callbacks", cwd=ROOT)

    assert result.returncode != 0
    assert "Import hiremate_lightning.callbacks" in result.stderr


def test_the_version_is_the_same_everywhere() -> None:
    version = hiremate_lightning.__version__
    assert f'\nversion = "{version}"\n' in PYPROJECT
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert (PACKAGE / "py.typed").is_file()
    assert 'hiremate_lightning = ["py.typed"]' in PYPROJECT


def test_files_that_are_not_python_are_installed() -> None:
    suffixes = (".py", ".pyc", ".md")
    names = {path.name for path in PACKAGE.rglob("*.*") if path.suffix not in suffixes}
    assert names >= {"page.css", "page.js"}
    assert not [name for name in names if f'"{name}"' not in PYPROJECT]


def test_every_dependency_is_pinned_for_development() -> None:
    """PyTorch and torchvision as a pair."""
    names = set().union(*map(listed, ("dependencies", "models", "examples", "docs", "dev")))
    names = {re.split(r"[\[<>=]", requirement)[0] for requirement in names}

    missing = {name for name in names if not re.search(rf"^{re.escape(name)}==", CONSTRAINTS, flags=re.MULTILINE)}

    assert not missing
    assert "\ntorch==2.13.0\n" in CONSTRAINTS
    assert "\ntorchvision==0.28.0\n" in CONSTRAINTS


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_commands_in_the_text_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))

    used = set(re.findall(r"\bmake ([a-z-]+)\b(?! *=)", _code_in((ROOT / name).read_text(encoding="utf-8"))))

    assert used
    assert used <= targets


def test_what_the_readme_links_to_is_in_the_source_distribution() -> None:
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    folders = set(re.findall(r"^graft (\S+)", manifest, flags=re.MULTILINE)) | {"hiremate_lightning"}
    files = {name for line in re.findall(r"^include (.*)", manifest, flags=re.MULTILINE) for name in line.split()}
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text(encoding="utf-8"))

    assert links
    assert not [link for link in links if link.split("/")[0] not in folders | files | {"LICENSE"}]


def _code_in(markdown: str) -> str:
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`|^    .*$", markdown, flags=re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("script", ["run", *(f"{name}.sh" for name in SCRIPTS)])
def test_scripts_run_as_they_are(script: str) -> None:
    path = ROOT / ".ci" / script

    syntax = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)

    assert path.stat().st_mode & 0o111
    assert syntax.returncode == 0, syntax.stderr


def test_nothing_names_the_place_where_packages_come_from() -> None:
    files = [ROOT / name for name in ("Makefile", "pyproject.toml", "constraints.txt", "README.md", "CONTRIBUTING.md")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in [*files, *(ROOT / ".ci").iterdir()]}

    named = [name for name, text in texts.items() if re.search(r"index-url|find-links|whl/", text)]

    assert not named

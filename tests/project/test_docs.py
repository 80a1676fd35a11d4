"""The documents: their code runs, their links lead somewhere, and every text that a user may be shown is explained."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from hiremate_lightning import write_html
from hiremate_lightning.command_line import cli
from hiremate_lightning.command_line import run as run_command
from hiremate_lightning.command_line.arguments import read as read_arguments
from tests.processes import run_python
from tests.tiny import blocks_plan

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
RUNNABLE = re.compile(r"<!-- runnable -->\n```python\n(.*?)```", flags=re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NOTEBOOK = DOCS / "rematerialization.ipynb"
PICTURE_STAND_IN = """
import sys, types
sys.modules["IPython"] = types.ModuleType("IPython")
sys.modules["IPython.display"] = display = types.ModuleType("IPython.display")
display.SVG = str
"""


def run(code: str, cwd: Path) -> str:
    """Run code in a new process, and give what it printed."""
    script = cwd / "code.py"
    script.write_text(code, encoding="utf-8")
    result = run_python(script, cwd=cwd, timeout=300, COLUMNS="160")
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# ---------------------------------------------------------------- code


@pytest.mark.slow
@pytest.mark.parametrize("page", [page.name for page in PAGES if RUNNABLE.search(read(page))])
def test_the_code_of_a_page_runs_in_order(page: str, tmp_path: Path) -> None:
    run("\n".join(RUNNABLE.findall(read(DOCS / page))), cwd=tmp_path)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(read(NOTEBOOK))["cells"] if cell["cell_type"] == "code"]

    printed = run("\n".join([PICTURE_STAND_IN, *("".join(cell["source"]) for cell in cells)]), cwd=tmp_path)

    assert "16 gradients are equal, bit for bit" in printed
    assert "impossible; the smallest budget found is" in printed


def test_the_notebook_is_stored_with_its_output_and_small() -> None:
    cells = [cell for cell in json.loads(read(NOTEBOOK))["cells"] if cell["cell_type"] == "code"]
    kinds = {kind for cell in cells for output in cell["outputs"] for kind in output.get("data", {})}

    assert all(cell["outputs"] for cell in cells)
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert "image/svg+xml" in kinds
    assert NOTEBOOK.stat().st_size < 100_000


@pytest.mark.slow
def test_the_picture_of_the_concepts_is_drawn_from_a_plan(tmp_path: Path) -> None:
    result = run_python(DOCS / "pictures.py", "--to", tmp_path / "picture.svg", timeout=300)

    assert result.returncode == 0, result.stderr
    drawn = read(tmp_path / "picture.svg")
    assert drawn.startswith("<svg ")
    assert "recomputed" in drawn
    assert drawn.count("<rect") > 20


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    targets = [link.partition("#")[0] for link in _links(page)]

    missing = sorted({target for target in targets if target and not (page.parent / target).exists()})

    assert not missing


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_every_link_to_a_heading_finds_it(page: Path) -> None:
    links = [link.partition("#") for link in _links(page) if "#" in link]

    missing = [
        f"{path}#{anchor}" for path, _, anchor in links if anchor not in _anchors(page.parent / path if path else page)
    ]

    assert not missing


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([a-z_]+\.md)$", read(ROOT / "mkdocs.yml"), flags=re.MULTILINE)

    assert sorted(listed) == sorted([*(page.name for page in PAGES), NOTEBOOK.with_suffix(".md").name])


def test_each_limit_takes_one_or_two_sentences() -> None:
    """What happens, and what to do; numbers that were measured are in benchmarks/results/."""
    limits = re.findall(r"^- (.*(?:\n  .*)*)", read(DOCS / "limits.md"), flags=re.MULTILINE)

    long = [limit for limit in limits if len(re.findall(r"[.?](?=\s|$)", limit)) > 2]

    assert len(limits) > 50
    assert not long


def _links(page: Path) -> list[str]:
    """List what a page refers to in this repository; code may hold brackets of its own, and formulas too."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", read(page), flags=re.DOTALL)
    return [link for link in LINK.findall(prose) if "://" not in link and re.search(r"[./#]", link)]


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", read(page), flags=re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in headings}


# ---------------------------------------------------------------- texts of errors and warnings

SHOWN = ("warn", "_warn", "_warn_once", "rank_zero_warn", "warning")  # what they are given is shown to users
IN_TABLES = ("MODULES", "DISTRIBUTED_TYPES", "STRATEGIES")  # dictionaries of shown texts
NOT_SHOWN = {"AttributeError", "TypeError", "KeyError", "StopIteration"}  # Python's own
NOT_SHOWN |= {"WorkerLostError", "NotShownError", "CopyError", "SizesDifferError", "WrongAtSizesError"}  # caught
FIXED_WORDS = 3  # fewer of them, between what differs, don't tell a text
COMPARED_WORDS = 8


def test_every_error_and_warning_is_explained() -> None:
    explained = _words(read(DOCS / "troubleshooting.md"))

    texts = [(place, " ".join(words)) for place, words in _shown_texts()]
    missing = [f"{place}: {text}" for place, text in texts if f" {text} " not in explained]

    assert not missing, "docs/troubleshooting.md says nothing of:\n" + "\n".join(missing)


def test_every_error_and_warning_is_in_a_test_by_its_words() -> None:
    """Three words in a row of each text are what some test of it expects."""
    others = [read(path) for path in Path(__file__).parents[1].rglob("*.py") if path != Path(__file__)]
    expected = "".join(_words(re.sub(r"\\[.()\[\]]|\.\*", " ", text)) for text in others)

    missing = [
        f"{place}: {' ... '.join(pieces)}"
        for place, pieces in _all_texts()
        if (runs := {run for piece in pieces for run in _runs_of_words(piece)})
        and not any(f" {run} " in expected for run in runs)
    ]

    assert not missing, "no test expects the words of:\n" + "\n".join(missing)


def _runs_of_words(text: str) -> Iterator[str]:
    words = _words(text).split()
    return (" ".join(words[i : i + FIXED_WORDS]) for i in range(len(words) - FIXED_WORDS + 1))


def test_texts_are_found_raised_warned_returned_and_in_constants() -> None:
    found = {" ".join(words) for _, words in _shown_texts()}

    expected = [
        "which is not in memory",  # raised, after two values
        "bytes is too small for",  # built by a function
        "There are two HiRemateCallbacks in this Trainer Keep",  # raised, of Lightning
        "was called with gradients but in eval mode",  # warned
        "plans already max plans steps of other input",  # said
        "it is planned already Call remove hiremate model",  # returned as a reason
        "DeepSpeed lays all weights into one flat tensor",  # kept in a dictionary
        "Trying to backward through the graph a second",  # kept in a constant
    ]
    assert [text for text in expected if not any(one.startswith(text) for one in found)] == []


def _words(text: str) -> str:
    """Leave words and spaces: line ends, quotes and marks differ between code and page."""
    return f" {' '.join(re.sub(r'[^A-Za-z0-9%]+', ' ', text).split())} "


def _shown_texts() -> Iterator[tuple[str, list[str]]]:
    """Give the first fixed words of each text that the package raises or warns with, and its place."""
    for place, text in _all_texts():
        words = _first_fixed_words(text)
        if words:
            yield place, words


def _all_texts() -> Iterator[tuple[str, list[str]]]:
    for path in sorted([*(ROOT / "hiremate_lightning").rglob("*.py"), *(ROOT / "callbacks").glob("*.py")]):
        for line, text in _texts(ast.parse(read(path))):
            yield f"{path.relative_to(ROOT)}:{line}", text


def _texts(tree: ast.Module) -> Iterator[tuple[int, list[str]]]:
    constants = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_shown(node):
            for argument in node.args:
                if pieces := _pieces(argument, constants):
                    yield node.lineno, pieces
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("_reason"):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield inner.lineno, _pieces(inner.value, constants)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            names = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            if any(isinstance(name, ast.Name) and name.id in IN_TABLES for name in names):
                yield from ((value.lineno, _pieces(value, constants)) for value in node.value.values)


def _is_shown(call: ast.Call) -> bool:
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    is_error = name.endswith(("Error", "Exception")) and name not in NOT_SHOWN
    return is_error or name in SHOWN


def _pieces(text: ast.expr, constants: dict[str, ast.expr]) -> list[str]:
    """Give what is fixed in a text, split where something is filled in."""
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        return re.split(r"%[sd]|\{\w+\}", text.value)
    if isinstance(text, ast.JoinedStr):
        joined = "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in text.values)
        return joined.split("\0")
    if isinstance(text, ast.BinOp):
        return [*_pieces(text.left, constants), *_pieces(text.right, constants)]
    if isinstance(text, ast.Name) and text.id in constants:
        return _pieces(constants[text.id], constants)
    if isinstance(text, ast.Call) and isinstance(text.func, ast.Attribute) and text.func.attr == "format":
        return _pieces(text.func.value, constants)
    return []


def _first_fixed_words(pieces: list[str]) -> list[str]:
    for piece in pieces:
        words = _words(piece).split()
        if len(words) >= FIXED_WORDS:
            return words[:COMPARED_WORDS]
    return []


# ---------------------------------------------------------------- the site


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")

    command = ("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site")
    result = run_python(*command, cwd=ROOT, timeout=300, NO_MKDOCS_2_WARNING="1")

    assert result.returncode == 0, result.stdout + result.stderr
    assert "WARNING" not in result.stderr
    made = read(tmp_path / "site" / "api" / "index.html")
    assert all(name in made for name in ("HiRemateCallback", "find_max_batch_size", "InfeasibleBudgetError"))
    notebook = read(tmp_path / "site" / "rematerialization" / "index.html")
    assert "16 gradients are equal, bit for bit" in notebook
    assert "<svg " in notebook
    assert 'href="../rematerialization/"' in read(tmp_path / "site" / "concepts" / "index.html")
    pages = {page.stem for page in PAGES} - {"index"}
    assert pages <= {path.name for path in (tmp_path / "site").iterdir()}


# ---------------------------------------------------------------- commands

COMMAND = re.compile(r"(?:^\$? ?|`)(hiremate (?:\\\n|[^`\n])+)", flags=re.MULTILINE)
PLACEHOLDERS = ("FACTORY", "FILE", "...")
PYTHON = re.compile(r"```python\n(.*?)```", flags=re.DOTALL)
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]


def commands() -> dict[str, str]:
    """Return each `hiremate` command that a text shows, without its placeholders, and the text."""
    found = {command.strip(): text.name for text in TEXTS for command in COMMAND.findall(read(text))}
    found |= dict.fromkeys("".join(cli._EXAMPLES.values()).replace("\\\n", "").splitlines(), "help")
    return {command: place for command, place in found.items() if not any(word in command for word in PLACEHOLDERS)}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the texts name, as far as these show them, and a plan."""
    shown = {"layers.py": "class Net(", "models.py": "def gpt2(", "llama.py": "def llama("}
    blocks = [block for text in TEXTS for block in PYTHON.findall(read(text))]
    for name, first in shown.items():
        (tmp_path / name).write_text(next(block for block in blocks if first in block), encoding="utf-8")
    with (tmp_path / "models.py").open("a", encoding="utf-8") as file:
        file.write(read(tmp_path / "llama.py") + "\nfrom layers import Net, Tagger as bert\n")
    (tmp_path / "torchvision").mkdir()  # stands for an installed package
    (tmp_path / "plan.json").write_text(blocks_plan().to_json())
    write_html(blocks_plan(), tmp_path / "plan.html")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("models")
def test_every_command_of_a_text_is_understood() -> None:
    parser, shown = cli._parser(), commands()
    assert len(shown) > 15
    for command in shown:
        words = shlex.split(command, comments=True)[1:]
        if words[:1] == [cli.RUN]:
            run_command.parser().parse_known_args(words[1:])
        elif words and words[0] in cli._EXAMPLES and len(words) > 1:
            if words[0] == "doctor":  # what follows is a script's
                words = list(takewhile(lambda word: not word.endswith(".py"), words))
            read_arguments(parser.parse_args([*words, *(["--budget", "1GiB"] if words == ["plan"] else [])]))


@pytest.mark.slow
@pytest.mark.usefixtures("models")
def test_the_commands_on_models_without_packages_run(capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands():
        words = shlex.split(command, comments=True)[1:]
        if "layers.py" in command or (words and words[0] == "show" and len(words) > 1):
            assert cli.main(words) == 0, command
            assert capsys.readouterr().out

"""What is written from the records of `hiremate_lightning.options`: signatures, docstrings, and two pages.

    python -m tests.option_docs --write

writes them after an option has changed; test_options.py says where they differ. Signatures and docstrings are real text
of the files, so that editors and the site find them without running anything.
"""

from __future__ import annotations

import argparse
import ast
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import page_tables
from hiremate_lightning.options import OPTIONS, SIZE_OPTIONS, Option

ROOT = Path(__file__).resolve().parents[1]
TABLE, ERRORS = ROOT / "docs" / "api.md", ROOT / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- options: begin -->", "<!-- options: end -->"
WIDTH = 120


SEARCH = {**SIZE_OPTIONS, "solver": OPTIONS["solver"]}  # what a search shares with other entry points


@dataclass(frozen=True)
class EntryPoint:
    """A function or class whose arguments are options."""

    file: str
    name: str  # its name; of a class, `__init__` has the arguments
    options: Mapping[str, Option]
    has_all: bool = False  # whether an option that it doesn't have yet is added


ENTRY_POINTS = (
    EntryPoint("hiremate_lightning/api.py", "hiremate", OPTIONS, has_all=True),
    EntryPoint("callbacks/planning.py", "HiRemateCallback", OPTIONS, has_all=True),
    EntryPoint("hiremate_lightning/sizes/batch_size.py", "find_max_batch_size", SEARCH),
    EntryPoint("callbacks/batch_size.py", "HiRemateBatchSizeFinder", SEARCH),
)


def stale(entries: Sequence[EntryPoint] = ENTRY_POINTS) -> list[Path]:
    """Return the files that are not as the options say."""
    return [path for path, text in _written(entries).items() if path.read_text(encoding="utf-8") != text]


def _written(entries: Sequence[EntryPoint] = ENTRY_POINTS) -> dict[Path, str]:
    files = {TABLE: _with_block(TABLE, table()), ERRORS: _with_block(ERRORS, errors())}
    for entry in entries:
        path = ROOT / entry.file
        text = files.get(path) or path.read_text(encoding="utf-8")
        for write in (_signature, _documented):  # from the bottom of the function to its top
            text = write(text, entry)
        files[path] = text
    return files


# ---------------------------------------------------------------- functions


def _function(text: str, entry: EntryPoint) -> tuple[ast.FunctionDef, str, int]:
    """Find what has the arguments, and its docstring with the first line of that."""
    owner = next(node for node in ast.parse(text).body if getattr(node, "name", None) == entry.name)
    assert isinstance(owner, ast.FunctionDef | ast.ClassDef)
    documentation = owner.body[0]
    assert isinstance(documentation, ast.Expr)
    assert isinstance(documentation.value, ast.Constant)
    inner = owner
    if isinstance(owner, ast.ClassDef):
        inner = next(node for node in owner.body if getattr(node, "name", None) == "__init__")
    assert isinstance(inner, ast.FunctionDef)
    return inner, str(documentation.value.value), documentation.lineno


def _signature(text: str, entry: EntryPoint) -> str:
    """Write the arguments, one a line."""
    function, _, _ = _function(text, entry)
    lines = text.splitlines()
    places = {argument.arg: argument.lineno - 1 for argument in [*function.args.args, *function.args.kwonlyargs]}
    added = [
        lines[place]
        if option is None
        else f"{_indent(lines[place])}{option.name}: {option.annotation} = {_default(option)},"
        for option, place in _in_order(entry, places)
    ]
    first, last = min(places.values()), max(places.values())
    assert last - first + 1 >= len(places), "one argument a line"
    return _joined([*lines[:first], *added, *lines[last + 1 :]])


def _default(option: Option) -> str:
    return json.dumps(option.default) if isinstance(option.default, str) else repr(option.default)


def _in_order(entry: EntryPoint, places: Mapping[str, int]) -> Iterator[tuple[Option | None, int]]:
    """Go through lines with an argument each, and through options that are new, with the line that is like theirs."""
    names, seen = {place: name for name, place in places.items()}, set(places)
    first, last = min(names), max(names)
    order = list(entry.options)
    for place in range(first, last + 1):
        option = entry.options.get(names.get(place, ""))
        yield option, place
        if option is None or not entry.has_all:
            continue
        for name in order[order.index(option.name) + 1 :]:
            if name in seen:
                break
            yield entry.options[name], place


def _documented(text: str, entry: EntryPoint) -> str:
    """Write what the docstring says of the options among its arguments."""
    function, documentation, first = _function(text, entry)
    names = [argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]]
    lines = text.splitlines()
    start = next(i for i in range(first - 1, len(lines)) if lines[i].strip() == "Args:")
    end = next(i for i in range(start, len(lines)) if not lines[i].strip())
    indent = _indent(lines[start]) + "    "
    entries: dict[str, list[str]] = {}
    for line in lines[start + 1 : end]:
        if not line.startswith(f"{indent} "):
            entries[line.strip().partition(":")[0]] = []
        entries[next(reversed(entries))].append(line)
    written = [
        line
        for name in names
        if name != "self"
        for line in (_entry(entry.options[name], indent) if name in entry.options else entries[name])
    ]
    assert documentation, "an entry point has a docstring"
    return _joined([*lines[: start + 1], *written, *lines[end:]])


def _entry(option: Option, indent: str) -> list[str]:
    return textwrap.wrap(
        f"{option.name}: {option.meaning}",
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _joined(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- the pages


def table() -> str:
    rows = [
        (f"`{o.name}`", f"`{o.annotation}`", f"`{_default(o)}`", o.allowed, o.meaning, _flag_of(o))
        for o in OPTIONS.values()
    ]
    return page_tables.table(("option", "type", "default", "must be", "meaning", "`hiremate run`"), rows)


def _flag_of(option: Option) -> str:
    has_flag = option.flag is not None or option.name == "budget"
    return f"`{option.flag_name}`" if has_flag else ""


def errors() -> str:
    options = {**OPTIONS, **SIZE_OPTIONS}.values()
    return "\n".join(f"> {o.name} must be {o.allowed}, found …\n" for o in options if o.allowed)


def _with_block(page: Path, block: str) -> str:
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n\n{block}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write what is not as the options say")
    asked = parser.parse_args()
    for path in stale():
        print(path.relative_to(ROOT))
        if asked.write:
            path.write_text(_written()[path], encoding="utf-8")

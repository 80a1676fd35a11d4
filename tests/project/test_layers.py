"""The shape of the package: what may import what, and where torch, Lightning, Accelerate and `print` may appear.

Each guard reads source text and returns the faults that it found. The first half of the file runs the guards on the
package; the second half shows, on sources made up for it, that each of them can fail.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "hiremate_lightning"

# Modules beside the folders: those that every folder may import, and those that users and their tests call.
BASE = ("errors", "thresholds", "out_of_memory", "units", "buckets", "options", "housekeeping", "objects")
DOORS = ("api", "testing", "__init__")
# A layer, a folder or a module of the package, imports from those before it. Within a folder nothing goes in circles,
# and `base` comes first.
ORDER = (
    *BASE,
    "records",
    "planning",
    "reporting",
    "torch_private",
    "memory",
    "rewriting",
    "capturing",
    "running",
    "measuring",
    "proofs",
    "calls",
    "signatures",
    "sessions",
    "targets",
    "sizes",
    *DOORS,
    "callbacks",
    "integrations",
    "command_line",
    "run",
    "__main__",
)
TORCH_FREE = ("records", "planning", "reporting")
ASKS_FOR_ITS_RANK = "reporting.report"
FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate")
MAY_USE_FRAMEWORKS = ("integrations", "callbacks")
MAY_USE_PRIVATE_TORCH = ("torch_private",)
# Private state of modules and tensors, where no name in the source says that it is torch's.
PRIVATE_ATTRIBUTES = (
    *("_backward_hooks", "_backward_pre_hooks", "_call_impl", "_cdata", "_compiled_call_impl"),
    *("_forward_hooks", "_forward_pre_hooks", "_is_view", "_version"),
)


@dataclass(frozen=True)
class Source:
    """One module of the package: its name below the package, such as "records.graph", and its text."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def layer(self) -> str:
        return self.name.split(".")[0]

    @property
    def folder(self) -> str:
        """The package that relative imports start from, below our own."""
        is_package = self.name in FOLDERS
        return self.name if is_package else self.name.rpartition(".")[0]

    def imports(self) -> Iterator[tuple[int, str]]:
        """Each imported name in full, with its line: `from .graph import Node` is PACKAGE.records.graph.Node."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(node)
                yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)

    def _origin(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        here = [PACKAGE, *(part for part in self.folder.split(".") if part)]
        start = here[: len(here) - (node.level - 1)]
        return ".".join([*start, *([node.module] if node.module else [])])


FOLDERS = (
    "callbacks",
    *(".".join(p.parent.relative_to(ROOT / PACKAGE).parts) for p in (ROOT / PACKAGE).rglob("__init__.py")),
)


def read_package() -> tuple[Source, ...]:
    """Read every module, the callbacks where they install."""
    found = {}
    for folder, prefix in ((ROOT / PACKAGE, ""), (ROOT / "callbacks", "callbacks.")):
        for path in sorted(folder.rglob("*.py")):
            name = prefix + ".".join(path.relative_to(folder).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return tuple(Source(name, text) for name, text in found.items())


def imported_modules(source: Source, names: Iterable[str]) -> Iterator[tuple[int, str]]:
    """The modules of the package that a source imports, by their names below it."""
    known = {*names, *ORDER}
    for line, imported in source.imports():
        if imported != PACKAGE and not imported.startswith(f"{PACKAGE}."):
            continue
        parts = imported.split(".")[1:]
        while parts and ".".join(parts) not in known:
            parts.pop()
        yield line, ".".join(parts) or "__init__"


def find_unknown(sources: tuple[Source, ...]) -> list[str]:
    return [f"{s.name}: not in ORDER, give it a place" for s in sources if s.layer not in ORDER]


def find_reversed_imports(sources: tuple[Source, ...]) -> list[str]:
    rank = {name: i for i, name in enumerate(ORDER)}
    names = [source.name for source in sources]
    faults = []
    for source in (source for source in sources if source.layer in rank):
        for line, target in imported_modules(source, names):
            layer = target.split(".")[0]
            if layer != source.layer and rank.get(layer, 0) > rank[source.layer]:
                faults.append(f"{source.name}:{line} imports {target}, which comes after it")
            if source.name.endswith(".base") and layer == source.layer:
                faults.append(f"{source.name}:{line} imports {target}, but base comes first")
    return faults


def find_cycles(sources: tuple[Source, ...]) -> list[str]:
    names = [source.name for source in sources]
    waiting = {s.name: {t for _, t in imported_modules(s, names) if t != s.name and t in names} for s in sources}
    while ready := [name for name, needs in waiting.items() if not needs & waiting.keys()]:
        for name in ready:
            del waiting[name]
    return [f"{name} imports in a circle, through {sorted(needs & waiting.keys())}" for name, needs in waiting.items()]


def find_foreign(sources: tuple[Source, ...], roots: tuple[str, ...], allowed: Callable[[Source], bool]) -> list[str]:
    return [
        f"{source.name}:{line} imports {imported}"
        for source in sources
        if not allowed(source)
        for line, imported in source.imports()
        if imported.split(".")[0] in roots
    ]


def find_torch_in_pure_modules(sources: tuple[Source, ...]) -> list[str]:
    return find_foreign(sources, ("torch",), lambda s: s.layer not in TORCH_FREE or s.name == ASKS_FOR_ITS_RANK)


def find_frameworks_in_core(sources: tuple[Source, ...]) -> list[str]:
    return find_foreign(sources, FRAMEWORKS, lambda source: source.layer in MAY_USE_FRAMEWORKS)


def find_private_torch(sources: tuple[Source, ...]) -> list[str]:
    faults = []
    for source in sources:
        if source.layer not in MAY_USE_PRIVATE_TORCH:
            faults += [f"{source.name}:{line} uses {name}" for line, name in _private_torch_names(source)]
    return faults


def _private_torch_names(source: Source) -> Iterator[tuple[int, str]]:
    aliases = {name: name for name in ("torch",)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            aliases.update({a.asname: a.name for a in node.names if a.asname and a.name.split(".")[0] == "torch"})
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            aliases.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    for line, imported in source.imports():
        if imported.split(".")[0] == "torch" and _is_private(imported):
            yield line, imported
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node).split(".")
            full = ".".join([aliases[chain[0]], *chain[1:]]) if chain[0] in aliases else ""
            if node.attr in PRIVATE_ATTRIBUTES or (_is_dunderless_private(node.attr) and full):
                yield node.lineno, full or ast.unparse(node)


def _is_private(dotted: str) -> bool:
    return any(_is_dunderless_private(part) for part in dotted.split("."))


def _is_dunderless_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def find_prints(sources: tuple[Source, ...]) -> list[str]:
    return [
        f"{source.name}:{node.lineno} calls print"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


GUARDS = (
    find_unknown,
    find_reversed_imports,
    find_cycles,
    find_torch_in_pure_modules,
    find_frameworks_in_core,
    find_private_torch,
    find_prints,
)


def modules_loaded_by(code: str) -> set[str]:
    """Run code in a new interpreter and name the top-level packages that it has loaded."""
    script = f"import sys\n{code}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    result = run_python("-c", script, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.__name__)
def test_the_package_keeps_its_shape(guard: Callable[[tuple[Source, ...]], list[str]]) -> None:
    faults = guard(read_package())

    assert not faults, "\n" + "\n".join(faults)


@pytest.mark.parametrize("folder", [name for name in FOLDERS if name])
def test_each_folder_has_a_short_readme_of_modules_that_exist(folder):
    place = ROOT / folder if folder == "callbacks" else ROOT / PACKAGE / folder.replace(".", "/")
    text = (place / "README.md").read_text(encoding="utf-8")
    modules = re.findall(r"`([\w/]+\.py)`", text)

    assert len(text.splitlines()) <= 20
    assert modules
    assert not [name for name in modules if not any((base / name).exists() for base in (place, ROOT / PACKAGE, ROOT))]


def defined_names() -> Iterator[str]:
    for node in (node for source in read_package() for node in ast.walk(source.tree)):
        if isinstance(node, (ast.Name, ast.Attribute)):
            yield ast.unparse(node).split(".")[-1] if isinstance(node.ctx, ast.Store) else ""
        else:
            yield getattr(node, "name", None) or ""


def test_names_in_readmes_and_files_in_docstrings_exist():
    """Names of torch and the command `del` aside."""
    texts = [path.read_text("utf-8") for path in (*ROOT.glob("callbacks/*.md"), *ROOT.glob(f"{PACKAGE}/**/README.md"))]
    names = set(re.findall(r"`((?!torch\.|del`)\w[\w.]*(?<!\.py))(?:\(\))?`", "".join(texts)))
    known = {PACKAGE, *defined_names(), *(part for source in read_package() for part in source.name.split("."))}
    files = set(re.findall(r"`(?:[\w.]+/)*(\w+\.py)`", "".join(source.text for source in read_package())))

    assert not [name for name in names if not {*name.split(".")} <= known]
    assert not files - {path.name for top in ("callbacks", PACKAGE, "tests") for path in ROOT.glob(f"{top}/**/*.py")}


def test_the_map_for_contributors_has_each_layer_in_order():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    base, *rows = re.findall(r"^\| (?:\[`([\w/]+)/`\]\(.*?\) )?\|(.*)", text, re.MULTILINE)
    layers = [folder.split("/")[0] or re.search(r"`(\w+)`", words)[1] for folder, words in rows]

    assert not [name for name in FOLDERS if name and f"`{name.replace('.', '/')}/`" not in text]
    assert not [name for name in BASE if f"`{name}`" not in base[1]]
    assert layers == sorted(layers, key=ORDER.index)


def test_the_package_is_read_with_its_callbacks() -> None:
    names = {source.name for source in read_package()}

    assert {"__init__", "errors", "records.graph", "planning.solvers", "planning.solvers.base", "callbacks"} <= names


def test_the_core_loads_without_lightning_and_accelerate() -> None:
    core = [s.name for s in read_package() if s.layer not in (*MAY_USE_FRAMEWORKS, "__init__")]
    code = "\n".join([f"import {PACKAGE}", *(f"import {PACKAGE}.{name}" for name in core)])

    loaded = modules_loaded_by(code)

    assert "torch" in loaded
    assert not loaded & set(FRAMEWORKS)


def test_loading_a_framework_would_be_seen() -> None:
    loaded = modules_loaded_by("import types\nsys.modules['accelerate.utils'] = types.ModuleType('accelerate.utils')")

    assert "accelerate" in loaded & set(FRAMEWORKS)


@pytest.mark.parametrize(
    ("guard", "name", "text"),
    [
        (find_unknown, "helpers", ""),
        (find_reversed_imports, "records.graph", "from ..planning.plan import Plan"),
        (find_reversed_imports, "records.graph", "from ..planning import plan"),
        (find_reversed_imports, "records.graph", "import hiremate_lightning.planning.plan"),
        (find_reversed_imports, "records.graph", "def late():\n    from hiremate_lightning.planning.plan import Plan"),
        (find_reversed_imports, "planning.solvers.ilp", "from ...sessions.session import Session"),
        (find_reversed_imports, "planning.solvers", "from ...sessions.session import Session"),
        (find_reversed_imports, "planning.solvers.base", "from .ilp import solve"),
        (find_reversed_imports, "sessions.session", "from ..callbacks import HiRemateCallback"),
        (find_reversed_imports, "sessions.session", "import hiremate_lightning"),
        (find_reversed_imports, "api", "from .integrations import accelerate"),
        (find_torch_in_pure_modules, "planning.solvers.ilp", "import torch"),
        (find_torch_in_pure_modules, "records.graph", "from torch import fx"),
        (find_frameworks_in_core, "sessions.session", "from lightning.pytorch import Trainer"),
        (find_frameworks_in_core, "api", "import accelerate.utils"),
        (find_private_torch, "sessions.session", "import torch._dynamo"),
        (find_private_torch, "sessions.session", "from torch import _functorch"),
        (find_private_torch, "sessions.session", "from torch._functorch.aot_autograd import aot_function"),
        (find_private_torch, "sessions.session", "from torch.utils import _pytree as pytree"),
        (find_private_torch, "sessions.session", "import torch\nx = torch._C._autograd"),
        (find_private_torch, "sessions.session", "import torch as t\nx = t._dynamo.reset()"),
        (find_private_torch, "sessions.session", "from torch import fx\nx = fx.graph._BoxedCodeGen()"),
        (find_private_torch, "sessions.session", "def f(x):\n    return x._version"),
        (find_prints, "reporting.report", "def f():\n    print('hello')"),
    ],
)
def test_a_guard_can_fail(guard: Callable[[tuple[Source, ...]], list[str]], name: str, text: str) -> None:
    faults = guard((Source(name, text),))

    assert faults
    assert faults[0].startswith(name)


def test_a_circle_within_a_folder_is_found() -> None:
    sources = (
        Source("running.program", "from .execution import GraphRuntime"),
        Source("running.execution", "from .program import Program"),
    )

    assert len(find_cycles(sources)) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("planning.plan", "import json\nfrom ..records.graph import Graph\nfrom .solvers.base import Solution"),
        ("planning.solvers.ilp", "from ...records.graph import Graph\nfrom .base import Problem"),
        ("planning.solvers", "from . import base\nfrom .base import Problem"),
        (
            "sessions.session",
            "import torch\nfrom ..torch_private import aot\nfrom ..planning import planner\nx = torch.__version__",
        ),
        ("sessions.session", "from ..torch_private.hooks import set_call\nself_ = object()\nx = self_._plans"),
        (
            "callbacks.hiremate",
            "from lightning.pytorch import Callback\nfrom hiremate_lightning.sessions.session import Session",
        ),
        ("torch_private.aot", "from torch._functorch.partitioners import _is_tangent"),
    ],
)
def test_what_is_allowed_passes_every_guard(name: str, text: str) -> None:
    faults = [fault for guard in GUARDS for fault in guard((Source(name, text),))]

    assert not faults

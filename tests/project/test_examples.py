"""Every example runs as it is written, with small sizes; `test_install` runs the README's."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hiremate_lightning.planning.plan import Measurement
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "gpt": "--budget 60% --steps 8 --blocks 4 --width 64 --context 64 --batch 16",
    "unet": "--budget 60% --steps 8 --width 8 --side 96 --batch 4",
    "largest_batch": "--budget '12 MiB' --blocks 1 --width 32 --steps 3",
    "fsdp2": "--steps 4 --blocks 2 --width 32 --context 64 --batch 8",
    "plain": "--steps 4 --batch 1024",
    "accelerate_lm": "--steps 5 --layers 1 --batch 4",
    "transformers_trainer": "--steps 5 --layers 1 --batch 4 --cpu",
}
NEEDS = {"unet": "skimage", "accelerate_lm": "transformers", "transformers_trainer": "transformers"}
PROGRAMS = {
    "python ": "",
    "torchrun ": "-m torch.distributed.run --standalone ",  # on a port of its own
    "accelerate launch ": "-m accelerate.commands.launch ",  # its other commands import timm, which needs torchvision
}


def commands_of(name: str) -> list[str]:
    """List the commands that the first lines of an example give."""
    text = ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")))
    return [line.strip() for line in (text or "").splitlines() if f"examples/{name}.py" in line]


def run(*command: str, cwd: Path, **variables: str) -> str:
    """Run Python in a new process, wide enough that no table wraps, and give what it printed."""
    result = run_python(*command, cwd=cwd, timeout=300, COLUMNS="160", **variables)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def run_example(name: str, number: int, cwd: Path) -> str:
    """Run an example by one of its own commands, with small sizes added."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason="the extra that has it is not installed")
    command = f"{commands_of(name)[number]} {SMALL[name]}".replace("examples/", f"{ROOT}/examples/")
    if "torchrun " in command:  # its processes end as plain ones may not, see leave()
        command = command.replace(f"{ROOT}/examples/", f"-m tests.processes {ROOT}/examples/", 1)
    for program, module in PROGRAMS.items():
        command = command.replace(program, module)
    words = shlex.split(command)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    return run(*words[len(variables) :], cwd=cwd, PYTHONPATH=str(ROOT), **variables)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_an_example_proves_that_both_runs_are_the_same(name: str, tmp_path: Path) -> None:
    printed = run_example(name, 0, tmp_path)

    assert "8 of 8 losses equal" in printed
    assert "5 of 5 measured steps" in printed
    assert "The proof holds." in printed
    assert printed.startswith("Loading PyTorch and Lightning"), "a line comes before what takes seconds"
    assert "bits, plain" not in printed, "the losses are shown on request"
    assert 'hiremate(model, budget="60%", optimizer=optimizer)' in printed or name == "unet"
    assert (tmp_path / "hiremate_plan.html").exists()


@pytest.mark.parametrize(
    ("planned_ms", "extra", "words"),
    [
        ([105, 106, 106, 107, 107, 108], "+6.5%", "median of 6 pairs"),
        ([106, 107, 110, 118, 150, 166], "+6.2%, predicted", "too busy a machine to tell: pairs differ by 47 points"),
    ],
)
def test_one_extra_time_is_shown_and_its_spread(planned_ms: list[float], extra: str, words: str) -> None:
    """The demo on an idle machine and on a busy one."""
    proof = runpy.run_path(str(ROOT / "examples" / "proof.py"))

    pairs_ms = [(100.0, planned) for planned in planned_ms]

    plain, shown, why = proof["time_cells"](pairs_ms, 0.062)
    measured = proof["timed"](SimpleNamespace(with_measured=Measurement), pairs_ms).overhead

    assert plain == "100 ms"
    assert measured is None or f"{measured:+.1%}" == extra
    assert (measured is None) == ("predicted" in extra)
    assert shown == extra
    assert words in why


def test_the_rulers_of_the_demo_fit_a_usual_terminal() -> None:
    source = (ROOT / "examples" / "proof.py").read_text(encoding="utf-8")
    rules = [words.format(budget="10.5 GiB", PAIRS=7) for words in re.findall(r'console.rule\(f?"(.*)"\)', source)]

    assert len(rules) == 3
    assert all(len(rule) <= 80 - 8 for rule in rules)


@pytest.mark.slow
def test_the_plain_example_trains_and_shows_its_plan(tmp_path: Path) -> None:
    printed = run_example("plain", 0, tmp_path)

    losses = [float(loss) for loss in re.findall(r"^step \d  loss ([0-9.]+)$", printed, flags=re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert re.search(r"^planned peak +[0-9.]+ MiB$", printed, flags=re.MULTILINE)


@pytest.mark.slow
def test_the_sharded_example_is_equal_in_less_memory(tmp_path: Path) -> None:
    printed = run_example("fsdp2", 0, tmp_path)

    assert "yes, bit for bit" in printed
    assert re.search(
        r"^added by a step +[0-9.]+ [MK]iB without a plan, [0-9.]+ [MK]iB with one$", printed, re.MULTILINE
    )


@pytest.mark.slow
def test_the_largest_batch_is_found_and_trained_with(tmp_path: Path) -> None:
    printed = run_example("largest_batch", 0, tmp_path)

    size, plain = map(int, re.findall(r"^batch size +(\d+), (\d+) without a plan$", printed, flags=re.MULTILINE)[0])
    assert size > plain > 0
    assert re.search(r"^measured peak +[0-9.]+ MiB of 12.0 MiB$", printed, flags=re.MULTILINE)
    assert len(re.findall(r"^step \d  loss", printed, flags=re.MULTILINE)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"), [("transformers_trainer", 0), ("accelerate_lm", 1)], ids=["one process", "two processes"]
)
def test_a_language_model_trains_inside_its_budget(name: str, number: int, tmp_path: Path) -> None:
    printed = run_example(name, number, tmp_path)

    assert len(re.findall(r"\bloss\b.{0,4}\d", printed)) == 5
    assert "(60%)" in printed
    assert re.search(r"measured: peak [0-9.]+ MiB, predicted [0-9.]+ MiB", printed)


BASE = {"torch", "lightning", "accelerate", "mip", "highsbox", "numpy", "packaging", "psutil", "rich"}
INSTALLS = {"scikit-image": "skimage", "transformers": "transformers"}  # what texts say to install, and its module


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_says_at_once_what_to_install(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{NEEDS[name]}.py").write_text(f"raise ModuleNotFoundError('No module named {NEEDS[name]}')")
    (tmp_path / "torch.py").write_text("raise AssertionError('torch is loaded first, which takes seconds')")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    result = run_python(ROOT / "examples" / f"{name}.py", PYTHONPATH=path)

    package = next(package for package, module in INSTALLS.items() if module == NEEDS[name])
    assert result.returncode == 1
    assert result.stderr.endswith(f" Install it first: {sys.executable} -m pip install {package}\n")
    assert result.stderr.count("\n") == 1


def test_what_an_example_imports_is_there_or_it_installs_it() -> None:
    """There is what `make demo` installs: the package and what it asks for, without any extra."""
    for path in (ROOT / "examples").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        roots = {name.split(".")[0] for name in imported} - sys.stdlib_module_names - BASE - {"hiremate_lightning"}
        lacking = roots - {other.stem for other in path.parent.glob("*.py")}
        installed = {INSTALLS[word] for word in re.findall(r"pip install ([\w-]+)", ast.get_docstring(tree) or "")}
        assert lacking == installed, path.name


def test_the_readme_installs_what_its_commands_need() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for place in re.finditer(r"^\.venv/bin/python examples/(\w+)\.py", readme, flags=re.MULTILINE):
        name = place[1]
        before = re.findall(r"^\.venv/bin/python -m pip install ([\w-]+)$", readme[: place.start()], flags=re.MULTILINE)
        assert NEEDS.get(name) in {None, *(INSTALLS[package] for package in before)}
    assert "make demo" in readme


def test_every_example_is_run_here() -> None:
    here = Path(__file__).read_text(encoding="utf-8")

    examples = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"proof"}

    assert all(f'"{name}' in here for name in examples)

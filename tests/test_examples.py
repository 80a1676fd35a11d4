"""Every example runs as it is written, with small sizes, and the README's too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SMALL_GPT = ("--budget", "60%", "--steps", "8", "--blocks", "4", "--width", "64", "--context", "64", "--batch", "16")
SMALL_UNET = ("--budget", "60%", "--steps", "8", "--width", "8", "--side", "96", "--batch", "4")


def run(*command: str, cwd: Path) -> str:
    """Run Python in a new process, wide enough that no table wraps, and give what it printed."""
    environment = {**os.environ, "COLUMNS": "160"}
    result = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), [("gpt", SMALL_GPT), ("unet", SMALL_UNET)])
def test_an_example_proves_that_both_runs_are_the_same(name: str, sizes: tuple[str, ...], tmp_path: Path) -> None:
    if name == "unet":
        pytest.importorskip("skimage", reason="the extra `examples` is not installed")

    printed = run(str(ROOT / "examples" / f"{name}.py"), *sizes, cwd=tmp_path)

    assert "8 of 8 equal" in printed
    assert "within the budget" in printed
    assert "The proof holds." in printed


@pytest.mark.slow
def test_the_plain_example_trains_and_tells_its_plan(tmp_path: Path) -> None:
    printed = run(str(ROOT / "examples" / "plain.py"), "--steps", "4", "--batch", "1024", cwd=tmp_path)

    losses = [float(loss) for loss in re.findall(r"^step \d  loss ([0-9.]+)$", printed, flags=re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert re.search(r"^planned peak +[0-9.]+ MiB$", printed, flags=re.MULTILINE)


@pytest.mark.slow
def test_the_accelerate_example_trains_within_the_budget_of_the_environment(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("transformers", reason="the extra `models` is not installed")
    monkeypatch.setenv("HIREMATE_BUDGET", "60%")

    printed = run(str(ROOT / "examples" / "accelerate_lm.py"), "--steps", "5", "--layers", "2", cwd=tmp_path)

    assert printed.count("loss") == 5
    assert "(60%)" in printed
    assert "measured: peak" in printed


@pytest.mark.slow
def test_the_first_example_of_the_readme_runs(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = tmp_path / "readme.py"
    script.write_text(re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)[0], encoding="utf-8")

    run(str(script), cwd=tmp_path)


def test_every_example_is_run_here() -> None:
    here = Path(__file__).read_text(encoding="utf-8")

    examples = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"proof"}

    assert all(f'"{name}' in here for name in examples)

"""Models of other packages train within their budget as in plain training; docs/compatibility.md lists many more."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
# Frozen embeddings, which run before what is captured, are taken to stay to the end of the step, and don't.
PREDICTED_HIGH = {"lora": 1.03}
QUICK = ("llama", "t5", "mixer", "dit", "fno", "sage", "lora")


@pytest.fixture
def compatibility(monkeypatch):
    """Import the command, which finds what lies beside it."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return pytest.importorskip("compatibility")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # other packages warn of what is theirs
@pytest.mark.parametrize("name", QUICK)
def test_a_model_of_another_package_is_exact_within_its_budget(name, compatibility):
    package = importlib.import_module("zoo.packages").CASES[name].package
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")

    result = compatibility.check(name)

    assert result.unequal == ""
    assert result.reference == "eager"
    assert result.measured_bytes <= result.budget_bytes
    assert 0.98 <= result.predicted_bytes / result.measured_bytes <= PREDICTED_HIGH.get(name, 1.02)


def test_the_page_shows_failures_with_their_reasons(compatibility):
    good = compatibility.Result(
        "gpt2", "transformers", "GPT-2", "50%", plain_bytes=100, measured_bytes=50, budget_bytes=50, predicted_bytes=50
    )
    over = compatibility.Result("bert", "transformers", "BERT", "50%", measured_bytes=60, budget_bytes=50)
    wrong = compatibility.Result(
        "t5", "transformers", "T5", "50%", unequal="3 tensors differ", measured_bytes=50, budget_bytes=50
    )
    failed = compatibility.Result("opt", "transformers", "OPT", error="RuntimeError: no")

    text = compatibility.page([good, over, wrong, failed])

    assert "**2 of 4 exact, 2 of 4 within budget.**" in text
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| ") and "`" in line}
    assert "**no**" not in rows["gpt2"]
    assert all("**no**" in rows[name] for name in ("bert", "t5", "opt"))
    for reason in ("`bert`: Over its budget.", "`t5`: Not exact: 3 tensors differ.", "`opt`: Failed: RuntimeError: no"):
        assert reason in text


def test_runs_are_compared_bit_for_bit(compatibility):
    import numpy as np

    def run(loss, gradient):
        return compatibility._Training([{"loss": np.float32(loss), "gradient": gradient}])

    same = run(1.0, np.array([1.0, np.nan]))
    assert compatibility._difference(same, run(1.0, np.array([1.0, np.nan]))) == ""
    assert "first loss of step 1" in compatibility._difference(same, run(1.0000001, np.array([1.0, np.nan])))
    assert "first gradient" in compatibility._difference(run(1.0, np.array([0.0])), run(1.0, np.array([-0.0])))
    assert "first gradient" in compatibility._difference(run(1.0, None), run(1.0, np.array([0.0])))

"""The tests for a GPU on a simulated one, where there is none."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tests.processes import ROOT, run_python
from tests.simulated_gpu import build

CHECKED = ("2.13",)  # versions of torch whose interfaces the simulated device implements

pytestmark = [
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has CUDA's own kernels"),
    pytest.mark.skipif(not torch.__version__.startswith(CHECKED), reason=f"checked with torch {', '.join(CHECKED)}"),
    pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler, or no headers of Python"),
    pytest.mark.skipif(sys.platform != "linux", reason="the library is built for Linux"),
]
FILES = (
    *("behaviour/budget/test_gpu", "behaviour/budget/test_offloading"),
    *("behaviour/exactness/test_any_order", "behaviour/exactness/test_offloaded", "behaviour/exactness/test_loops"),
    "behaviour/integrations/test_strategy",
)
ONE_NETWORK = "not resnet and not unet"  # on the host's kernels a network whole is as slow as all that is small
PARTS = {
    "training": "(gpt-tight-autocast or unet-tight-float32) and training_by_a_plan or script",  # each network and type
    "offloading": f"test_offloading and not resnet or test_offloaded and {ONE_NETWORK}",
    # a search for the largest batch takes minutes of a CPU
    "rest": "not training_by_a_plan and not script and not largest_batch and not test_offload",
}


@pytest.mark.parametrize("part", PARTS)
def test_the_tests_for_a_gpu_pass_on_a_simulated_one(part):
    options = ("-p", "no:cacheprovider", "-q", "-m", "gpu", "-k", PARTS[part])
    run = run_python("-m", "tests.simulated_gpu", *options, *(f"tests/{name}.py" for name in FILES), cwd=ROOT)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
    assert " passed" in run.stdout


EXPECTED = {
    "environment": ("machine", "driver", "device", "device to device, read and written", "doctor: small plan on cuda"),
    "headline": (
        *("eager", "checkpoint", "selective", "ours-50", "ours-30", "ours-70", "ours-least", "bar", "budget-0.5"),
        *("ours-least, its operations", "worst plan", "ours-at-selective", "ours-100", "bar, all methods"),
    ),
    "three": ("stable_diffusion_unet, ours-50", "vit_large, ours-50", "vit_large, checkpoint"),
    "offload": (
        *("link, both ways at once", "matrix product beside copies", "memory traffic beside copies"),
        *("gpt2_medium, eager", "gpt2_medium, all on the host", "gpt2_medium, ours-50-offload"),
    ),
    "truth": ("test_gpu.py::test_intervals_start_with_what_lives", "gpt, float32", "gpt, autocast to bfloat16"),
    "budget": (
        "expandable_segments:False, planned at 1.00 of the budget",
        "expandable_segments:False, plain at the same limit",
    ),
    "batch": ("plain", "planned, search", "planned"),
    "host": ("gpt, eager", "gpt, ours-100", "gpt, ours-50"),
    "allocator": ("tensors of 1 MiB", "cudnn.benchmark=True", "batch norm, with cuDNN and without", "worst plan"),
}
MOST_FILES, MOST_BYTES = 8, 16 * 2**20


@pytest.mark.slow
@pytest.mark.models
def test_the_check_of_a_gpu_rehearses_each_of_its_parts(tmp_path):
    run = run_python("benchmarks/gpu_check.py", "--simulated", "--minutes", "20", "--out", tmp_path, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    others = {r["name"]: r["status"] for r in records if r["status"] != "ok"}
    too_little = {"vit_large, ours-50": "infeasible"}  # half of the memory, for a ViT as small as this one
    assert others in ({}, too_little), (tmp_path / "report.md").read_text()
    for part, names in EXPECTED.items():
        assert set(names) <= {r["name"] for r in records if r["part"] == part}, part
    order = list(dict.fromkeys(r["part"] for r in records if r["part"] in EXPECTED))
    assert order == list(EXPECTED)
    ours = {r["name"]: r for r in records if r["part"] == "headline" and "predicted_mib" in r}
    assert all(r["over_budget_mib"] == 0 and r["graphs"] == 1 for r in ours.values())
    first, *others = (ours[name]["profile_s"] for name in ("ours-50", "ours-30", "ours-70", "ours-least"))
    assert first > 0
    assert {first} == set(others), "nothing is profiled again for another budget"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) <= MOST_FILES + len(list((tmp_path / "plans").rglob("*")))
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    assert run.stdout == (tmp_path / "report.md").read_text()

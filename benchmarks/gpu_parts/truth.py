"""Truth before speed: the tests for a GPU, then eight models trained plain and planned, compared bit for bit."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .records import FAILED, OK, TAIL
from .runner import Context, Send

ROOT = Path(__file__).parents[2]
MODELS = ("gpt", "bert", "vit", "resnet50", "unet", "t5", "llama", "convnext")
TOY_MODELS = ("gpt",)  # a small one of this name
TESTS = (
    "tests/behaviour/budget/test_gpu.py",
    "tests/behaviour/exactness/test_loops.py",
    "tests/behaviour/integrations/test_strategy.py",
)
TOY_TESTS = "known_allocations or intervals or every_operation"
TESTS_SHARE = 0.45  # of the part's time
STEPS, SOLVE_S = 2, 2.0
BUDGET, WHOLE = "50%", "100%"


def run(context: Context) -> None:
    """Run the tests, then compare models, several at once: this is about numbers, not about time."""
    if context.has_device:
        limit_s = TESTS_SHARE * context.left_s()
        context.isolated("tests", run_tests, is_toy=context.is_toy, until=time.time() + limit_s)
    else:
        context.no_device("tests marked gpu")
    names = TOY_MODELS if context.is_toy else MODELS
    given = {"device": context.device, "is_toy": context.is_toy}
    tasks = [(f"{name}, exactness", compare, {**given, "model": name}) for name in names]
    context.together(tasks, at_once=max(1, min(len(names), (os.cpu_count() or 2) // 2)))


# -------------------------------------------------------------------- tests


class Recorder:
    """A plugin of pytest: sends how each test ends, and stops when the time is over."""

    def __init__(self, send: Send, until: float) -> None:
        self._send, self._until = send, until
        self._session: Any = None
        self._count = 0

    def pytest_sessionstart(self, session: Any) -> None:
        """Keep the session, to stop it."""
        self._session = session

    def pytest_collection_finish(self, session: Any) -> None:
        """Keep how many tests there are."""
        self._count = len(session.items)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Send the outcome of a test, or of a phase of it that failed."""
        if report.when != "call" and not report.failed and not (report.when == "setup" and report.skipped):
            return
        self._count -= 1
        name = report.nodeid.rpartition("/")[2]
        if report.failed:
            self._send(name, FAILED, kind="test", traceback=str(report.longrepr)[-TAIL:])
        else:
            self._send(name, OK if report.passed else report.outcome, kind="test")
        if time.time() > self._until:
            self._session.shouldstop = "the time is over"

    def pytest_sessionfinish(self) -> None:
        """Send how many tests the time did not reach."""
        self._send("tests that the time did not reach", count=max(0, self._count))


def run_tests(send: Send, is_toy: bool, until: float) -> None:
    """Run the tests marked gpu, in this process."""
    import pytest

    os.chdir(ROOT)
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-o", "minversion=7"]
    files: Sequence[str] = TESTS[:1] if is_toy else TESTS
    chosen = ["-k", TOY_TESTS] if is_toy else []
    pytest.main([*options, "-m", "gpu", *chosen, *files], plugins=[Recorder(send, until)])


# -------------------------------------------------------------------- exactness


def compare(send: Send, model: str, device: str, is_toy: bool) -> None:
    """Train a model plain and planned with deterministic kernels, in float32 and under autocast."""
    import torch
    from zoo import models
    from zoo.large import TOYS

    if is_toy:
        models.MODELS.update(TOYS)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    for half in (False, True):
        compare_in(send, model, device, half)
        torch.compiler.reset()


def compare_in(send: Send, name: str, device: str, half: bool) -> None:
    """Compare plain and planned steps; where they differ, compare with the captured graph too."""
    from hiremate_lightning import get_plan

    label = f"{name}, {'autocast to bfloat16' if half else 'float32'}"
    eager = train(name, device, half, None)[0]
    again = train(name, device, half, None)[0]
    planned, module = train(name, device, half, BUDGET)
    plan = get_plan(module)
    values: dict[str, Any] = {
        "like_eager": difference(planned, eager),
        "eager_like_itself": difference(again, eager),
        "like_captured_graph": None,
        "extra_time": None if plan is None else plan.predicted_overhead,
    }
    if values["like_eager"] != EQUAL:
        values["like_captured_graph"] = difference(planned, train(name, device, half, WHOLE)[0])
    is_right = EQUAL in (values["like_eager"], values["like_captured_graph"]) or values["eager_like_itself"] != EQUAL
    send(label, OK if is_right else FAILED, **values)


EQUAL = "equal"


def train(name: str, device: str, half: bool, budget: str | None) -> tuple[dict[str, Any], Any]:
    """Take a few steps from the same start; return loss, gradients and buffers of the last one, and the module."""
    import torch
    from rival_worker import Setup, Trainer

    from hiremate_lightning import hiremate

    trainer = Trainer(Setup(name, "eager", Path(), device))
    if budget is not None:
        hiremate(trainer.module, budget, verbose=False, time_limit_s=SOLVE_S)
    torch.manual_seed(11)
    for _ in range(STEPS):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=half):
            trainer.module.zero_grad(set_to_none=True)
            loss = trainer.module(*trainer.batch)
        loss.backward()
    module = trainer.module
    found = {"loss": loss.detach(), **dict(module.named_buffers())}
    found |= {f"gradient of {path}": p.grad for path, p in module.named_parameters() if p.grad is not None}
    return {path: tensor.detach().cpu() for path, tensor in found.items()}, module


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """Describe what differs, and by how much at most."""
    import torch

    if found.keys() != expected.keys():
        return f"not the same tensors: {sorted(found.keys() ^ expected.keys())[:3]}"
    differing = [path for path in found if not torch.equal(found[path], expected[path])]
    if not differing:
        return EQUAL
    path = max(differing, key=lambda p: relative(found[p], expected[p]))
    return f"{len(differing)} of {len(found)} differ, most {path}, by {relative(found[path], expected[path]):.1e}"


def relative(found: Any, expected: Any) -> float:
    """Compute the largest difference over the largest value expected."""
    scale = float(expected.double().abs().max()) or 1.0
    return float((found.double() - expected.double()).abs().max()) / scale

"""What all tests share: one seed, and skips that say why."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import rich
import torch
import torch._dynamo

from hiremate_lightning.memory.metering import MemoryMeter
from hiremate_lightning.planning import solutions
from hiremate_lightning.planning.solvers import base
from hiremate_lightning.signatures.eager_predictions import EagerPredictions
from hiremate_lightning.testing import changed_thresholds

MODEL_PACKAGES = ("transformers", "timm")

if hasattr(torch._dynamo.config, "issue_3_13_0_warning"):
    torch._dynamo.config.issue_3_13_0_warning = False  # advice against one release of Python, at each capture
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # it takes 20 ms of each capture, for a line of a log


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in MODEL_PACKAGES if importlib.util.find_spec(name) is None]
    skips = []
    if not torch.cuda.is_available():
        skips.append(("gpu", "no CUDA device"))
    if missing:
        skips.append(("models", f"not installed: {', '.join(missing)} (extra: models)"))
    for marker, reason in skips:
        for item in items:
            if item.get_closest_marker(marker) is not None:  # keywords have the names of folders, too
                item.add_marker(pytest.mark.skip(reason=reason))


_tests_run = itertools.count(1)


@pytest.fixture(autouse=True)
def _quick_garbage_collection() -> None:
    """Let collections pass over what stays, a million objects of imported packages: a planned step takes several.

    What a module's fixtures or caches hold is frozen too. Now and then all is looked at, or cycles of it would stay.
    """
    if next(_tests_run) % 50 == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(name="without_made_code")
def _without_made_code() -> Iterator[None]:
    """Let steps of new sizes that do not fit as they are written offload values."""
    with changed_thresholds(makes_code=False):
        yield


@pytest.fixture(name="made_code_at_once")
def _made_code_at_once() -> Iterator[None]:
    """Let steps of new sizes that do not fit as they are written run by made code from the first one on."""
    with changed_thresholds(worth_made_code=0.0):
        yield


@pytest.fixture(autouse=True)
def _no_meter_left() -> Iterator[None]:
    """Stop the measurement of a step that a test began and never ended."""
    yield
    for reference in reversed(MemoryMeter._running):
        meter = reference()
        if meter is not None:
            meter.stop()


@pytest.fixture(autouse=True)
def change_thresholds() -> Iterator[Callable[..., None]]:
    """Change thresholds for the rest of a test.

    In all tests small values are finished in place, as large ones are, steps run by plans that recompute nothing, since
    captured code is what is tested, and a busy machine adds no lines.
    """
    with ExitStack() as stack:

        def change(**changes: float) -> None:
            stack.enter_context(changed_thresholds(**changes))

        change(finished_bytes=64, gives_back=False, long_stage_s=1e6)
        yield change


class PlanningLog(logging.Handler):
    """What the package logs at the level DEBUG as it plans."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def of(self, words: str) -> list[str]:
        """List how the lines go on that begin with some words, such as "capturing" or "proving"."""
        return [text.removeprefix(words).strip() for text in self.texts if text.startswith(words)]


@pytest.fixture
def planning_log() -> Iterator[PlanningLog]:
    """Note what is captured, traced, proved, solved and measured."""
    logger, handler = logging.getLogger("hiremate_lightning"), PlanningLog()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.setLevel(before)
    logger.removeHandler(handler)


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Replace the clock of solves by one on which so many seconds pass from one look to the next."""

    def set_seconds(seconds: float) -> None:
        ticks = itertools.count()
        monkeypatch.setattr(base, "monotonic", lambda: seconds * next(ticks))

    return set_seconds


@pytest.fixture
def shared_console() -> Iterator[Callable[..., None]]:
    """Make the console that all of rich shares anew, from options and what the environment says now."""
    yield rich.reconfigure
    rich.reconfigure()


@pytest.fixture
def one_process() -> Iterator[None]:
    """Be the only process of a group."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def no_automatic_collection() -> Iterator[None]:
    """Let cycles live until somebody asks for their collection."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _nothing_found_before() -> None:
    """Let no test find what another one has found for the same step."""
    solutions.forget()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_kept_by_accelerate() -> Iterator[None]:
    """Forget what Accelerate keeps for a process, and what transformers' Trainer tells it in the environment."""
    before = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
    yield
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    os.environ.update(before)
    if "accelerate.state" in sys.modules:
        state = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()  # else optimizers wait for a micro-batch of the test before


@pytest.fixture(autouse=True)
def _autocast_left_as_found() -> Iterator[None]:
    """Fail where autocast stays entered: later tests would train with weights that it cast in this one."""
    yield
    torch.autocast_increment_nesting()
    depth = torch.autocast_decrement_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    assert depth == 0, f"{depth} blocks of autocast are still open"


@pytest.fixture(autouse=True)
def _hooks_left_allowed() -> Iterator[None]:
    """Fail where hooks on what autograd saves stay banned: later tests could call no checkpoint."""
    yield
    is_allowed = torch._C._autograd._saved_tensors_hooks_is_enabled()
    torch._C._autograd._saved_tensors_hooks_enable()
    assert is_allowed, "hooks on saved tensors are banned"


@pytest.fixture
def _captures_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture steps of all sizes, those included that fit the budget as they are."""
    monkeypatch.setattr(EagerPredictions, "predict", lambda *_: None)

"""How long the first plan of a model will take, said before its first step."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from pathlib import Path

from torch import nn

from .. import thresholds
from ..housekeeping import JsonFile
from ..planning.plan import PlanningTime

BASE_S = 1.0  # seconds of the first capture of a process
MODULE_S = 0.1  # seconds for each leaf module: a BERT of 6 layers has 81, and took 9 s of an idle core
OPERATION_S = 0.03  # seconds for each operation as torch.compile reads it
MOST_SLOWER = 4.0  # most by which this machine is taken to be slower than that core


class FirstWait:
    """Estimates the seconds until the first plan of a model, and stores them for the next run.

    Most of the time is Python: torch.compile's capture, and the proof of captured code. It grows with the number of
    modules, and with the time that a short Python loop takes now. If there is a folder for plans, a file in it has the
    seconds of an earlier run of the same model, which are returned instead.
    """

    def __init__(self, folder: Path | None, model_key: Callable[[], str]) -> None:
        self._folder, self._model_key = folder, model_key
        self._is_noted = False

    def expected_s(self, modules: int, operations: int = 0) -> float:
        """Return about how many seconds it will take, by the numbers of leaf modules and of captured operations."""
        known_s = self._file().read(lambda data: float(data["seconds"]))
        if known_s is not None:
            return known_s
        # The fastest of a few runs of a short loop: another process may take the core for a moment.
        loops_s = timeit.repeat("for number in range(50_000): number * number % 7", number=1, repeat=5)
        slower = min(max(0.5, 1000 * min(loops_s) / thresholds.current.usual_loop_ms), MOST_SLOWER)
        return slower * (BASE_S + MODULE_S * modules + OPERATION_S * operations)

    def took(self, planning: PlanningTime) -> None:
        """Store, after the first plan, the seconds that the next run needs again: those of capture and proof."""
        if not self._is_noted:
            self._is_noted = True
            self._file().write({"seconds": planning.capture_s + planning.prove_s})

    def _file(self) -> JsonFile:
        path = None if self._folder is None else self._folder / f"wait-{self._model_key()}.json"
        return JsonFile(
            path,
            "Ignored the seconds of planning in %s: %s",
            "Could not keep the seconds of planning in %s (%s); the next run guesses them",
        )


def modules_without_parts(root: nn.Module) -> int:
    """Return the number of leaf modules."""
    return sum(next(module.children(), None) is None for module in root.modules())

"""About how long it takes until the first plan of a model, said before its first step.

What takes the time is mostly Python: torch.compile's capture, and the proof that what it captured is right. That grows
with the modules that are called, and with how slow this machine's Python is now. In a folder for plans, the seconds of
the run before are known instead.
"""

from __future__ import annotations

import json
import logging
import timeit
from collections.abc import Callable
from pathlib import Path

from torch import nn

from .. import thresholds
from ..planning.plan import PlanningTime

log = logging.getLogger("hiremate_lightning")

BASE_S = 1.0  # the first capture of a process
MODULE_S = 0.1  # of a module without modules in it: a BERT of 6 layers has 81, and took 9 s of an idle core
OPERATION_S = 0.03  # of an operation as torch.compile reads it
MOST_SLOWER = 4.0


class FirstWait:
    """Foresees the seconds until the first plan of a model, and remembers them for the next run.

    Args:
        folder: Where plans are kept between runs, None for nowhere.
        describe: Returns a name of the model, the same in each run.
    """

    def __init__(self, folder: Path | None, describe: Callable[[], str]) -> None:
        self._folder, self._describe = folder, describe
        self._is_noted = False

    def expected_s(self, modules: int, operations: int = 0) -> float:
        """Return about how many seconds it will take, by modules without modules in them and captured operations."""
        before = self._read()
        if before is not None:
            return before
        # A short loop of Python, the fastest of some: another process may take the core for a moment.
        loops_s = timeit.repeat("for number in range(50_000): number * number % 7", number=1, repeat=5)
        slower = min(max(0.5, 1000 * min(loops_s) / thresholds.current.usual_loop_ms), MOST_SLOWER)
        return slower * (BASE_S + MODULE_S * modules + OPERATION_S * operations)

    def took(self, planning: PlanningTime) -> None:
        """Keep, when the first plan was made, the seconds of what the next run does again: costs and plans are kept."""
        if self._folder is None or self._is_noted:
            return
        self._is_noted = True
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path(self._folder).write_text(json.dumps({"seconds": planning.capture_s + planning.prove_s}))
        except OSError as error:
            log.debug("The seconds of planning were not kept: %s", error)

    def _read(self) -> float | None:
        if self._folder is None:
            return None
        try:
            return float(json.loads(self._path(self._folder).read_text())["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _path(self, folder: Path) -> Path:
        return folder / f"wait-{self._describe()}.json"


def modules_without_parts(root: nn.Module) -> int:
    """Count the modules that have no modules in them."""
    return sum(next(module.children(), None) is None for module in root.modules())

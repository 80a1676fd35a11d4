"""What a search for a size has found, and how it is shown."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ..units import format_bytes, format_ratio
from .size_search import SizeTrial


@dataclass(frozen=True)
class BatchSizeResult:
    """The best size within a budget; `int()` gives it.

    Attributes:
        size: The size. It has run.
        limited_by: What stands against a larger one.
        unplanned_size: The largest size that was predicted to fit without a plan, 0 for none.
        objective: "largest" or "throughput".
        budget_bytes: The budget, resident bytes included.
        max_overhead: Most predicted overhead that was accepted, a ratio.
        margin: Share of what the budget leaves beside weights and optimizer that predictions left free.
        trials: The sizes that were planned or run, ascending: the curve of size against peak and throughput.
        real_steps: Number of real training steps that the search ran.
        seconds: Time that it took.
    """

    size: int
    limited_by: str
    unplanned_size: int
    objective: str
    budget_bytes: int
    max_overhead: float
    margin: float
    trials: tuple[SizeTrial, ...]
    real_steps: int
    seconds: float

    def __int__(self) -> int:
        """Return the size."""
        return self.size

    @property
    def trial(self) -> SizeTrial | None:
        """What is known of the size; None where its plan could not be predicted."""
        return next((trial for trial in self.trials if trial.size == self.size), None)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, by name: bytes, ratios, seconds."""
        return asdict(self)

    def to_json(self) -> str:
        """Write all numbers as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: str | Path) -> None:
        """Write all numbers as JSON to a file."""
        Path(path).write_text(self.to_json())


COLUMNS = ("size", "predicted peak", "measured peak", "overhead", "samples/s", "verified")


def result_table(result: BatchSizeResult) -> Table:
    """Draw the trials as a table."""
    what = "largest size" if result.objective == "largest" else "size with the most samples per second"
    table = Table(
        title=f"HiRemate: {what} within {format_bytes(result.budget_bytes)} is {result.size}",
        caption=f"limited by {result.limited_by}; without a plan {result.unplanned_size} would fit; "
        f"{result.real_steps} real steps, {result.seconds:.1f} s",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == COLUMNS[-1] else "right")
    for trial in result.trials:
        peak_bytes = trial.measured_peak_bytes
        table.add_row(
            str(trial.size),
            format_bytes(trial.predicted_peak_bytes),
            "" if peak_bytes is None else format_bytes(peak_bytes),
            "does not fit" if trial.overhead is None else format_ratio(trial.overhead),
            "" if trial.samples_per_s is None else f"{trial.samples_per_s:.3g}",
            "no" if peak_bytes is None else "yes" if peak_bytes <= result.budget_bytes else "over the budget",
            style="bold green" if trial.size == result.size else None,
        )
    return table

"""Sizes, counts and shares at which the package begins to act otherwise, and switches of what it does, in one record.

Modules read `thresholds.current` each time, so that `testing.changed_thresholds` changes all of them in one place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds that tests lower, to reach with small models what large ones reach."""

    part_bytes: int = 2**20  # least of a part of a tensor that kernels work on: each part takes a few launches
    # Least bytes of a row of logarithms for a loss to be computed by rows. It does not depend on the number of rows, so
    # the graph is the same for each.
    row_bytes: int = 2**14
    # Least bytes of PyTorch's places of maxima in one picture, for a pool to name these in fewer bytes. Below it, the
    # launches take longer than it is worth.
    pooled_bytes: int = 2**14
    # Least bytes of a value that is finished in place. Below it, an allocation takes less time than the check that the
    # memory may be overwritten.
    finished_bytes: int = 2**17
    compared_values: int = 2**22  # most that a proof compares at once: a few hundred MiB of doubles
    decided_values: int = 2**22  # most of a tensor that is computed while code is traced
    size_traces: int = 128  # most traces of one graph that are kept, the latest used ones: each takes megabytes
    watched_calls: int = 16  # first calls of a module in which inner modules have slots; then one call in so many
    program_variables: int = 60_000  # most of Checkmate's program; larger ones are relaxed and rounded
    # Share of the peak of a plan that does not fit, beyond which an eager step takes more memory. It allows for the
    # blocks of an allocator.
    released_peak: float = 1.01
    # Time spent on saving memory at one size without a plan, before the size gets one, as a share of the time that
    # planning takes; and for all sizes together, before code for all sizes is made, in multiples of that time.
    worth_a_plan: float = 1.0
    worth_made_code: float = 8.0
    # Seconds after which a stage is named where no progress can be drawn, and from which on a wait is told before it.
    long_stage_s: float = 5.0
    gives_back: bool = True  # whether steps whose plan recomputes nothing run as the user wrote them where they fit
    makes_code: bool = True  # whether code for new sizes is made from traces of a few
    measures_times: bool = True  # whether times of operations are measured; else estimated, equal on all machines
    usual_loop_ms: float = 2.3  # of a short loop of Python on the idle core whose seconds of planning all waits are of


current = Thresholds()

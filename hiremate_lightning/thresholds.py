"""Sizes, counts and shares at which the package begins to act otherwise, in one record.

Modules read `thresholds.current` each time, so that `testing.changed_thresholds` changes all of them in one place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds that tests lower, to reach with small models what large ones reach.

    Attributes:
        part_bytes: Least bytes of a part of a tensor that kernels work on: each part takes a few launches.
        row_bytes: Least bytes of a row of logarithms for a loss to be computed by rows. It does not depend on the
            number of rows, so the graph is the same for each.
        pooled_bytes: Least bytes of PyTorch's places of maxima in one picture, for a pool to name these in fewer bytes.
            Below it, the launches take longer than it is worth.
        finished_bytes: Least bytes of a value that is finished in place. Below it, an allocation takes less time than
            the check that the memory may be overwritten.
        compared_values: Most values that a proof compares at once: a few hundred MiB of doubles.
        decided_values: Most values of a tensor that is computed while code is traced.
        size_traces: Most traces of one graph that are kept, the latest used ones: each takes megabytes on the host.
        watched_calls: First calls of a module in which inner modules have slots; after them, one call in so many.
        program_variables: Most variables of Checkmate's program; larger ones are relaxed and rounded.
        released_peak: Share of the peak of a plan that does not fit, beyond which an eager step takes more memory.
            It allows for the blocks of an allocator.
        worth_a_plan: Time spent on saving memory at one size without a plan, before the size gets one, as a share of
            the time that planning takes.
        worth_templates: The same for all sizes together, before code for all sizes is made: in multiples of the time
            that planning took.
        long_stage_s: A stage of planning that takes longer is named where no progress can be drawn, and a wait that
            takes longer is told before it.
        usual_loop_ms: Time of a short loop of Python on the idle core whose seconds of planning all waits are told by.
    """

    part_bytes: int = 2**20
    row_bytes: int = 2**14
    pooled_bytes: int = 2**14
    finished_bytes: int = 2**17
    compared_values: int = 2**22
    decided_values: int = 2**22
    size_traces: int = 128
    watched_calls: int = 16
    program_variables: int = 60_000
    released_peak: float = 1.01
    worth_a_plan: float = 1.0
    worth_templates: float = 8.0
    long_stage_s: float = 5.0
    usual_loop_ms: float = 2.3


current = Thresholds()

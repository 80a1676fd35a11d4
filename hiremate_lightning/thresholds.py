"""Sizes, counts and shares at which the package changes its behaviour, and switches of features, in one record.

Modules read `thresholds.current` each time, so that `testing.changed_thresholds` changes all of them in one place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds; tests lower them, so that small models behave as large ones."""

    part_bytes: int = 2**20  # least bytes of a part if a kernel works on a tensor in parts: each takes a few launches
    # Least bytes of a row of logarithms for a loss to be computed by rows. It does not depend on the number of rows, so
    # the graph is the same for any number.
    row_bytes: int = 2**14
    # Least bytes of the indices of maxima of one image for a pooling operator to store these in fewer bytes. Below it,
    # the additional launches take too long.
    pooled_bytes: int = 2**14
    # Least bytes of a value for its last operation to run in place. Below it, an allocation takes less time than the
    # check that the memory may be overwritten.
    finished_bytes: int = 2**17
    compared_values: int = 2**22  # most values that a proof compares at once: a few hundred MiB of doubles
    decided_values: int = 2**22  # most values of a tensor that is computed while code is traced
    size_traces: int = 128  # most traces of one graph that are kept, the latest used ones: each takes megabytes
    watched_calls: int = 16  # modules inside of planned ones have slots in so many first calls; then in one of so many
    program_variables: int = 60_000  # most variables of Checkmate's program; larger ones are relaxed and rounded
    # A plan that saves no memory is dropped if an eager step takes at most so many times its peak. More than 1 for the
    # blocks of an allocator.
    given_back_peak: float = 1.01
    # A size without a plan gets one after offloading has taken so many times as long as planning; code for all sizes is
    # made after offloading at all sizes together has.
    worth_a_plan: float = 1.0
    worth_made_code: float = 8.0
    # Seconds after which a stage is named if no progress bar can be drawn, and of waits that are reported before.
    long_stage_s: float = 5.0
    gives_back: bool = True  # whether steps whose plan recomputes nothing run eager if they fit
    makes_code: bool = True  # whether code for new sizes is made from traces of a few
    measures_times: bool = True  # whether times of operations are measured; else estimated, equal on all machines
    usual_loop_ms: float = 2.3  # time of a short Python loop on the idle core on which planning times were measured


current = Thresholds()

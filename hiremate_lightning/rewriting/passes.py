"""All passes over a joint graph, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable

from . import assignments, casts, fusion, losses, pooling
from .joint import Joint
from .nodes import drop_unread

PASSES: tuple[Callable[[Joint], None], ...] = (
    casts.show_types_of_norms,
    casts.share,
    casts.leave_out,
    assignments.gather,
    assignments.merge_with_bases,
    assignments.leave_out_views,
    losses.join,
    pooling.join,
    fusion.fuse,
)


def run_passes(joint: Joint) -> None:
    """Run all passes; before each pass and at the end, the graph has no unread operation without effects."""
    drop_unread(joint.graph)
    for run in PASSES:
        run(joint)
        drop_unread(joint.graph)

"""Programs of one schedule for sizes that were never traced.

The same code was traced at a few sizes, and the same schedule makes a program of each trace. These programs differ only
in integers: shapes, strides, offsets. One source is made of them, which has an expression of the sizes in place of each
differing integer. A program for other sizes is this source with the sizes bound to it: nothing is traced and no
operator is chosen again, so it takes microseconds.

Decisions that a trace makes from a size are those of the samples; the guards of the capture decide whether the code
serves a size. There is no such program if samples differ in more than integers, if an integer is no expression of the
sizes, or if too few sizes were traced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import fx

from ..capturing.capture import Captured
from ..records.expressions import Sizes, SizesDifferError, expression_of
from ..records.schedule import CopyOut, Schedule, lower
from ..records.step import Decisions
from ..rewriting.straight_line import Writer, compile_lines
from ..torch_private import aot
from .copies import HostMemory
from .program import Changes, Program, build

_PLACE = re.compile("\0(\\d+)\0")  # the place of a number in a source


class ProgramAtSizes:
    """The programs of one schedule at all sizes.

    Args:
        samples: The same code captured at a few sizes, the samples of a `CodeAtSizes`.
        sizes: The sizes of each sample.
        decisions: The nodes to recompute.

    Attributes:
        sizes: The sizes of the samples.
        schedule: The schedule of all programs.

    Raises:
        SizesDifferError: If the programs of the samples don't determine the programs of other sizes.
    """

    def __init__(self, samples: Sequence[Captured], sizes: Sequence[Sizes], decisions: Decisions) -> None:
        self.sizes = tuple(sizes)
        self._programs = list[Program]()
        for captured in samples:  # finish small results by the same operations as large ones
            finishes = {node: replace(finish, at_all_sizes=True) for node, finish in captured.finishes.items()}
            self._programs.append(build(replace(captured, finishes=finishes), lower(captured.graph, decisions)))
        first = self._programs[0]
        self.schedule: Schedule = first.schedule
        if any((p.schedule, p.saved, p.unread) != (first.schedule, first.saved, first.unread) for p in self._programs):
            raise SizesDifferError(f"The same decisions are other schedules at the sizes {sizes}")
        self._forward = _Source([program.forward_module for program in self._programs], sizes)
        self._variants = {Changes(): self._variant_of_samples(Changes())}

    def at(self, sizes: Sizes) -> Program:
        """Return the program for some sizes."""

        def variant(changes: Changes) -> Program:
            # Made in a backward, where nothing can be traced; all numbers have expressions, see `CodeAtSizes`.
            if changes not in self._variants:
                try:
                    self._variants[changes] = self._variant_of_samples(changes)
                except SizesDifferError:  # samples differ in the values that may be overwritten
                    self._variants[changes] = self._variant_of_samples(changes._replace(in_new_memory=True))
            program, source = self._variants[changes]
            return replace(program, forward=forward, backward=source.at(sizes), variant=variant)

        forward = self._forward.at(sizes)
        return variant(Changes())

    def _variant_of_samples(self, changes: Changes) -> tuple[Program, _Source]:
        programs = [program.variant(changes) for program in self._programs]
        return programs[0], _Source([program.backward_module for program in programs], self.sizes)


def program_of(captured: Captured, schedule: Schedule, host: HostMemory | None = None) -> Program:
    """Return the program of a schedule: built from the trace or, for code made from other sizes, from their programs.

    Args:
        captured: The captured code.
        schedule: A valid schedule of its graph.
        host: Memory of the host for offloaded values.

    Raises:
        SizesDifferError: If traces of other sizes don't determine the program.
    """
    programs = programs_of(captured, schedule)
    return build(captured, schedule, host) if programs is None else programs.at(captured.sizes)


def programs_of(captured: Captured, schedule: Schedule) -> ProgramAtSizes | None:
    """Return the programs of a schedule at all sizes; None if the captured code was itself traced.

    Raises:
        SizesDifferError: If traces of other sizes don't determine the programs.
    """
    code, key = captured.made_from, (schedule, captured.overwritten)
    if code is None:
        return None
    if key not in code.programs:
        code.programs[key] = None  # a failure below is not tried again
        if any(isinstance(operation, CopyOut) for operation in schedule.forward):
            raise SizesDifferError("A program holds the host's memory that values are offloaded to")
        samples = [sample.reading_once(captured.overwritten) for sample in code.samples]
        programs = ProgramAtSizes(samples, code.sizes, schedule.decisions(captured.graph))
        if programs.schedule == schedule:
            code.programs[programs.schedule, captured.overwritten] = programs  # keyed by the programs' own object too
    made: ProgramAtSizes | None = code.programs[key]
    if made is None:
        raise SizesDifferError("Traces of other sizes do not tell the programs of a schedule")
    return made


class _Source:
    """One source for the code of the same graph at several sizes."""

    def __init__(self, modules: Sequence[fx.GraphModule], sizes: Sequence[Sizes]) -> None:
        numbers = list[list[int]]()  # for each source, the numbers in its places

        def place(value: int) -> str:
            numbers[-1].append(value)
            return f"\0{len(numbers[-1]) - 1}\0"

        def write(module: fx.GraphModule) -> Writer:
            numbers.append([])
            return Writer(module, place)

        first, *others = [write(module) for module in modules]
        for other in others:  # sources may differ only in the numbers in their places
            if first.lines != other.lines:
                raise SizesDifferError("The same code runs other operations at other sizes")
            for name, value in first.known.items():
                other_value = other.known[name]
                if not _are_equal(value, other_value):
                    raise SizesDifferError(f"The same code names {value!r} at one size and {other_value!r} at another")
        names = [f"s{dimension}" for dimension in range(len(sizes[0]))]
        text = cache(lambda values: expression_of(sizes, values).source(names))
        texts = [text(values) for values in zip(*numbers, strict=True)]
        filled = [_PLACE.sub(lambda place: texts[int(place[1])], line) for line in first.lines]
        lines = [f"{', '.join(names)}, = sizes", *filled]
        self._run = compile_lines(lines, dict(first.known), "arguments, sizes")

    def at(self, sizes: Sizes) -> aot.Boxed:
        run = self._run
        return aot.mark_boxed(lambda arguments: run(arguments, sizes))


def _are_equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(other, torch.Tensor) and value.dtype == other.dtype and torch.equal(value, other)
    return value is other or (type(value) is type(other) and bool(value == other))

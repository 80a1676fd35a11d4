"""Run steps of captured parts with everything kept, on tensors without memory, and record what runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..capturing.capture import Captured
from ..measuring.describing import describe
from ..measuring.recording import Existing, StepRecord
from ..measuring.runs import Run
from ..memory.counting import CountingMeter
from ..records.costs import Profile
from ..records.schedule import keep_all, lower
from ..records.step import Call
from ..running.accumulation import Leaves
from ..running.execution import Part
from ..running.program import Program, build
from ..torch_private import sharding


class RecordedStep:
    """Runs the captured parts of a step and records them. Each step replaces the record of the one before.

    Attributes:
        parts: The parts captured so far.
        record: The latest step.
        meter: Counts the memory of that step.
        path: Path of the module that is being called.
    """

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.record = StepRecord(None, Existing())
        self.meter = CountingMeter(torch.device("cpu"))
        self.path = ""
        self._paths: list[str] = []
        self._programs: dict[Part, Program] = {}

    @contextmanager
    def recording(self, root: nn.Module, device: torch.device) -> Iterator[None]:
        """Record one step of a model.

        Args:
            root: The model.
            device: Whose allocator would hand out its memory.
        """
        self._paths.clear()
        self.meter = CountingMeter(device, sharding.resized_tensors(root))
        self.record = StepRecord(None, Existing(), root, self.meter)
        try:
            yield
        finally:
            self.record.close()

    def describe(self, profiles: Sequence[Profile], are_added: bool = False) -> tuple[list[Call], list[int]]:
        """Return the calls of the latest step, with the modules by their paths in the model, and the backwards' order.

        Args:
            profiles: Costs of each part.
            are_added: Whether gradients of parameters are added to those that exist, and die at once.
        """
        calls, order = describe(self.record, dict(enumerate(profiles)))
        runs = [run for run in self.record.runs if run.index in self.record.backwards]
        if are_added:
            calls = [call.without_gradients(run.added) for call, run in zip(calls, runs, strict=True)]
        paths = [self._paths[run.index] for run in runs]
        return [_below(call, path) if path else call for call, path in zip(calls, paths, strict=True)], order

    @property
    def captured_calls(self) -> list[Captured]:
        """What the calls of the latest step run that have a backward, in the order of their forwards."""
        return [run.part.captured for run in self.record.runs if run.index in self.record.backwards]

    # ---------------------------------------------------------------- conductor of the parts

    def take_in(self, captured: Captured) -> Part:
        """Make a part of a captured graph."""
        part = Part(captured, self)
        self.parts.append(part)
        self._programs[part] = build(captured, lower(captured.graph, keep_all(captured.graph)))
        return part

    def start(self, part: Part, arguments: Sequence[Any]) -> tuple[Program, Run]:
        """Choose the program of a forward."""
        program = self._programs[part]
        self._paths.append(self.path)
        return program, self.record.begin(part, self.parts.index(part), program, arguments)

    def forward_done(self, run: Run, outputs: Sequence[Any]) -> None:
        """Record the end of a forward."""
        self.record.forward_done(run, outputs)

    def backward_starts(self, run: Run, tangents: Sequence[Any], leaves: Leaves, retains: bool) -> None:
        """Record the start of a backward."""
        self.record.backward_starts(run, tangents, leaves, retains)

    def was_overwritten(self, part: Part, storages: Collection[int]) -> None:
        """Leave it as it is: everything is kept."""

    def settings_changed(self) -> None:
        """Leave it as it is: nothing is computed again."""

    def must_return(self, part: Part, positions: Collection[int]) -> None:
        """Leave it as it is: no gradients exist before this step."""

    def backward_done(self, run: Run) -> None:
        """Record the end of a backward."""
        self.record.backward_done(run)

    def name_of(self, tensor: torch.Tensor) -> str:
        """Describe a tensor."""
        return f"A tensor of shape {tuple(tensor.shape)}"

    def ran_out(self, error: torch.OutOfMemoryError) -> None:
        """Leave it as it is: without memory nothing runs out of it."""


def _below(call: Call, path: str) -> Call:
    """Return a call whose nodes' modules are named by their paths in the model."""
    nodes = tuple(replace(node, module=f"{path}.{node.module}".rstrip(".")) for node in call.graph.nodes)
    return replace(call, graph=replace(call.graph, nodes=nodes))

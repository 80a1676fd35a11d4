"""Capture the benchmark models' training steps and write them as JSON: graphs and profiles for the solver benchmarks.

    python benchmarks/graphs.py FOLDER [MODEL ...]

A model of any depth is named with its layers, as in small-t5:24 (`first_plan.py` has the names). Each graph goes to
FOLDER/MODEL.graph.json, the costs of its nodes, measured one by one, to FOLDER/MODEL.profile.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from first_plan import OF_DEPTH
from graph_files import write_step
from zoo.models import MODELS, Built

from hiremate_lightning.capturing.backend import planning_backend
from hiremate_lightning.capturing.capture import Captured
from hiremate_lightning.measuring.profiling import CostCache, measure
from hiremate_lightning.records.schedule import keep_all, lower
from hiremate_lightning.running.execution import GraphRuntime
from hiremate_lightning.running.program import Program, build
from hiremate_lightning.torch_private import dynamo


class _Plain:
    """Runs every captured graph without recomputation."""

    def __init__(self) -> None:
        self.found: list[Captured] = []
        self._programs: dict[int, Program] = {}

    def take_in(self, captured: Captured) -> GraphRuntime:
        """Make the runtime that runs a captured graph."""
        self.found.append(captured)
        runtime = GraphRuntime(captured, self)
        self._programs[id(captured)] = build(captured, lower(captured.graph, keep_all(captured.graph)))
        return runtime

    def start(self, runtime: GraphRuntime, arguments: Sequence[Any]) -> tuple[Program, None]:
        """Choose the program of a forward."""
        return self._programs[id(runtime.captured)], None

    def forward_done(self, run: None, outputs: Sequence[Any]) -> None:
        """Do nothing."""

    def backward_starts(self, run: None, tangents: Sequence[Any], leaves: Any, is_kept: Any) -> None:
        """Do nothing."""

    def was_overwritten(self, runtime: GraphRuntime, storages: Any) -> None:
        """Do nothing."""

    def must_return(self, runtime: GraphRuntime, positions: Any) -> None:
        """No gradients exist before the step."""

    def backward_done(self, run: None) -> None:
        """Do nothing."""

    def ran_out(self, error: torch.OutOfMemoryError) -> None:
        """Do nothing."""


def build_model(name: str) -> Built:
    """Build a model, of the depth that its name may say."""
    kind, _, layers = name.partition(":")
    return OF_DEPTH[kind](int(layers)) if layers else MODELS[kind]()


def capture_step(name: str) -> list[Captured]:
    """Run one step of a model and give its captured graphs."""
    module, batch = build_model(name)
    plain = _Plain()
    with dynamo.capturing_for_plans():
        loss = torch.compile(module, backend=planning_backend(plain.take_in), dynamic=False)(*batch)
        loss.backward()
    return plain.found


def main() -> None:
    """Write the largest captured graph of each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="made where it is missing")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: all of {', '.join(MODELS)}")
    options = parser.parse_args()
    unknown = {name for name in options.models if name.partition(":")[0] not in (OF_DEPTH if ":" in name else MODELS)}
    if unknown:
        parser.error(f"unknown models: {', '.join(sorted(unknown))}; choose from {', '.join(MODELS)}")
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    cache = CostCache()
    for name in options.models or MODELS:
        torch.compiler.reset()
        torch.manual_seed(0)
        start = time.perf_counter()
        captured = max(capture_step(name), key=lambda c: len(c.graph.nodes))
        middle = time.perf_counter()
        profile = measure(captured, cache)
        end = time.perf_counter()
        write_step(folder, name, captured.graph, profile)
        sys.stdout.write(
            f"{name}: {len(captured.graph.forward)}+{len(captured.graph.backward)} nodes, "
            f"captured in {middle - start:.1f} s, profiled in {end - middle:.1f} s\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()

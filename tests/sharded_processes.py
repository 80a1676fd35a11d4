"""What each of two processes does for test_sharding.py, which starts this file with torchrun.

Each case trains twice, plain and planned, from the same random states. What is right is decided by the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hiremate_lightning.planning import shared_solving
from tests import pipelines
from tests.pipelines import PIPELINES
from tests.processes import leave
from tests.sharded_tools import TOOLS, too_small
from tests.sharding import CASES, SCORED, TOO_SMALL, Left, train
from tests.shared_memory import SharedMemory


def models() -> dict[str, Callable[..., Left]]:
    """Return what trains models of transformers and timm, nothing where these are not installed."""
    if None in map(find_spec, ("transformers", "timm")):
        return {}
    from tests.sharded_models import MODELS

    return MODELS


def main(folder: Path, wanted: list[str]) -> None:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))  # who hangs fails
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shared_solving.PATIENCE_S = 60.0  # a machine that is busy must not decide on the outcome
    memory = SharedMemory(folder, rank, world)
    trainings: dict[str, Callable[[bool], Left]] = {
        **{case.name: partial(train, case, rank, memory) for case in (*CASES, *SCORED)},
        **{pipeline.name: partial(pipelines.train, pipeline, rank) for pipeline in PIPELINES},
        **{name: partial(train_with, rank) for name, train_with in TOOLS.items()},
        **{name: partial(train_model, rank, memory) for name, train_model in models().items()},
    }
    asked = [name for name in trainings if not wanted or name in wanted]
    found: dict[str, Any] = {name: tuple(trainings[name](planned) for planned in (False, True)) for name in asked}
    if not wanted or TOO_SMALL in wanted:
        found[TOO_SMALL] = too_small(rank, ("4 MiB", "500 KiB"))
    torch.save(found, folder / f"{rank}.pt")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

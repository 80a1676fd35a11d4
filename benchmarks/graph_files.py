"""Captured steps in a folder, as JSON: a graph in one file and its costs in another."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hiremate_lightning.records.costs import Profile, profile_from
from hiremate_lightning.records.graph import Direction, Graph, Node, Storage, StorageKind, Tensor

FORMAT_VERSION = 2


def write_step(folder: Path, name: str, graph: Graph, profile: Profile) -> None:
    """Write a step; `read_step` reads it back, equal."""
    graph_text = json.dumps({"format": FORMAT_VERSION, **asdict(graph)}, separators=(",", ":"))
    (folder / f"{name}.graph.json").write_text(graph_text)
    (folder / f"{name}.profile.json").write_text(json.dumps(asdict(profile), separators=(",", ":")))


def read_step(folder: Path, name: str) -> tuple[Graph, Profile]:
    """Read a step.

    Raises:
        ValueError: If it was written in another format.
    """
    data = json.loads((folder / f"{name}.graph.json").read_text())
    if data.pop("format", None) != FORMAT_VERSION:
        raise ValueError(f"Not a graph of format {FORMAT_VERSION}: write it again with this version")

    def freeze(record: dict[str, Any]) -> dict[str, Any]:
        return {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}

    nodes = tuple(Node(**{**freeze(n), "direction": Direction(n["direction"])}) for n in data.pop("nodes"))
    tensors = tuple(Tensor(**freeze(t)) for t in data.pop("tensors"))
    storages = tuple(Storage(**{**s, "kind": StorageKind(s["kind"])}) for s in data.pop("storages"))
    profile = profile_from(json.loads((folder / f"{name}.profile.json").read_text()))
    return Graph(nodes, tensors, storages, **freeze(data)), profile

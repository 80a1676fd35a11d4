"""Where a result comes from: processor, versions and commit, said in the same words on every page."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path


def provenance(*packages: str) -> str:
    """Say on what a benchmark runs.

    Args:
        packages: Names of distributions beside torch whose versions matter.
    """
    return f"{processor()}; {versions(*packages)}; commit {commit()}"


def versions(*packages: str) -> str:
    """Give the versions of torch, of other distributions, and of Python."""
    return ", ".join(
        [*(f"{name} {_version(name)}" for name in ("torch", *packages)), f"Python {platform.python_version()}"]
    )


def processor() -> str:
    """Name the processor; where the system doesn't tell in Linux's way, its architecture."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    """Give the commit of this clone, marked where code differs from it: results and documents may be under way."""
    name = _git("describe", "--always")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":/!benchmarks/results", ":/!docs")
    return f"{name}-dirty" if changed else name or "unknown"


def _git(*command: str) -> str:
    found = subprocess.run(["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"

"""How tests start other processes, and how a process of several ends."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def run_python(
    *arguments: str | Path, cwd: Path | str | None = None, timeout: float | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python on one thread in a new process, with some variables of the environment; wait for its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False,
        timeout=timeout,
    )  # fmt: skip


def run_two(module: str, folder: Path, timeout: float, **variables: str) -> list[Any]:
    """Run a module of the tests in two processes; return what each has saved in a folder."""
    done = run_python(*TORCHRUN, "-m", module, folder, cwd=ROOT, timeout=timeout, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def run_beside(*commands: tuple[str, ...], timeout: float) -> list[tuple[int, str]]:
    """Run modules of the tests beside each other; return the exit code of each, and what it wrote."""
    options = {"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "text": True}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = [subprocess.Popen([sys.executable, "-m", *command], **options, **both) for command in commands]
    try:
        texts = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, texts, strict=True)]


def leave() -> NoReturn:
    """End this process when all have come here, without the end of the interpreter and of PyTorch's process group.

    A thread of gloo needs the interpreter's lock to drop its last work. Where the interpreter ends meanwhile, the
    process aborts; where the group's destructor holds the lock, it hangs (pytorch/pytorch#56297). Plain scripts too.
    """
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":  # python -m tests.processes FILE ARGUMENTS: run a script, and leave
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    leave()

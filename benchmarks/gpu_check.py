"""Measure everything that only a GPU can show, in minutes, with one command.

    python benchmarks/gpu_check.py --minutes 9 --out DIR [--wheels DIR] [--parts headline,host]
    python benchmarks/gpu_check.py --list | --budget-of-parts
    python benchmarks/gpu_check.py --simulated --out DIR

Parts run one after the other, the most valuable first, each in a process of its own that is killed at its limit. After
each measurement a line is appended to DIR/results.jsonl and DIR/report.md is written anew, so a kill at any second
loses the measurement under way only. Time that a part leaves goes to those after it; where time is short, the last
parts get none. The report is printed at the end, and when the command is told to stop. Plans are kept in DIR/plans: a
second call with the same DIR, or with one that has nothing but this folder, neither profiles nor solves them again. The
network is never asked. Without a GPU, what needs none runs with small models.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from gpu_parts import PARTS, Part
from gpu_parts.processes import end_tree
from gpu_parts.records import CHECK, CONSOLE, ENDED, KILLED, LINES, OK, PLANS, REPORT, Results
from gpu_parts.runner import SETTING, Setting
from provenance import commit

HERE = Path(__file__).resolve().parent
END_S = 4.0  # kept for the end of the command
REHEARSAL = 4.0  # times its share is what a part may take with small models: how long they take says nothing
MOST_CONSOLE_BYTES = 8 * 2**20
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
BUILD = "from tests.simulated_gpu import build; build.build()"


class StoppedError(Exception):
    """The command was told to stop."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together, default 9")
    parser.add_argument("--out", type=Path, help="folder of the results: new, empty, or of a call before")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to use, not to install: see gpu_wheels.sh")
    parser.add_argument("--parts", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--list", action="store_true", help="say what the parts measure")
    parser.add_argument("--budget-of-parts", action="store_true", help="say how many seconds each part has")
    parser.add_argument("--simulated", action="store_true", help="rehearse on the simulated GPU, with small models")
    options = parser.parse_args(arguments)
    unknown = set(options.parts.split(",")) - set(names)
    if unknown:
        parser.error(f"--parts: expected some of {', '.join(names)}, found {', '.join(sorted(unknown))}")
    if options.out is None and not (options.list or options.budget_of_parts):
        parser.error("--out: expected a folder for the results")
    there = {path.name for path in options.out.iterdir()} if options.out is not None and options.out.exists() else set()
    if there and not there & {LINES, PLANS}:
        parser.error(f"--out: expected a new or empty folder, or one of a call before, found files in {options.out}")
    return options


def chosen(options: argparse.Namespace) -> list[Part]:
    """Find the parts that were asked for, in their order."""
    return [part for part in PARTS if part.name in options.parts.split(",")]


def limit_s(parts: Sequence[Part], left_s: float, is_toy: bool = False) -> float:
    """Compute the limit of the first of several parts: its share of the time that is left, and at least its seconds."""
    share_s = min(left_s, parts[0].seconds * max(1.0, left_s / sum(part.seconds for part in parts)))
    return min(left_s, REHEARSAL * share_s) if is_toy else share_s


def described(parts: Sequence[Part], seconds: float) -> Iterator[str]:
    """Print what the parts measure, and how long each may take."""
    left = list(parts)
    while left:
        limit = limit_s(left, seconds)
        seconds -= limit
        part = left.pop(0)
        yield f"{part.name:12} {limit:5.0f} s  {part.about}"


# -------------------------------------------------------------------- surroundings


@contextmanager
def wheels_unpacked(folder: Path | None) -> Iterator[list[str]]:
    """Put wheels into a folder for the time of the check; yield what to add to Python's path."""
    if folder is None:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
        wheels = sorted(str(path) for path in folder.glob("*.whl"))
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*command, "--no-cache-dir", "--target", place, *wheels], check=True, stdout=sys.stderr)
        yield [place]


def environment(more_paths: Sequence[str]) -> dict[str, str]:
    """Make the environment of the parts: offline, and with this clone on Python's path."""
    paths = [str(HERE), str(HERE.parent), *more_paths, os.environ.get("PYTHONPATH", "")]
    found = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONUNBUFFERED": "1"}
    found |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # else to look for a device spoils it for forked processes
    return {"OMP_NUM_THREADS": "4", **os.environ, **OFFLINE, **found}


def find_device(setting: Setting, variables: dict[str, str]) -> Setting:
    """Ask a process whether PyTorch sees a GPU, and whether forked processes may use it."""
    command = [sys.executable, "-m", "gpu_parts.look"]
    told = {**variables, SETTING: setting.to_json()}
    found = subprocess.run(command, env=told, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"This check can't run with {sys.executable}:\n{found.stderr[-2000:]}")
    device, way = found.stdout.split()[-2:]
    return replace(setting, device=device, is_toy=device == "cpu", can_fork=way == "fork")


# -------------------------------------------------------------------- running


def run_part(part: Part, setting: Setting, variables: dict[str, str], seconds: float) -> tuple[str, dict[str, str]]:
    """Run a part until it ends, or kill it at its limit; return how it ended."""
    told = replace(setting, deadline=time.time() + seconds)
    with (Path(setting.folder) / CONSOLE).open("ab") as console:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu_parts", part.name],
            env={**variables, SETTING: told.to_json()},
            stdin=subprocess.PIPE,  # it ends when this process does, whatever ends this one
            stdout=console,
            stderr=console,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return KILLED, {"why": f"at its limit of {seconds:.0f} s"}
        finally:
            end_tree(process.pid)
            process.wait()
    return (OK, {}) if code == 0 else (KILLED, {"why": f"its process ended with {code}"})


def check(options: argparse.Namespace, results: Results) -> None:
    """Run all parts that were asked for."""
    with wheels_unpacked(options.wheels) as paths, tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        variables = environment(paths)
        setting = Setting(str(options.out), scratch, "cuda", options.simulated, options.simulated, can_fork=True)
        if options.simulated:
            subprocess.run([sys.executable, "-c", BUILD], env=variables, check=True)  # once; it takes no part's time
        end = time.time() + 60 * options.minutes - END_S
        if not options.simulated:
            setting = find_device(setting, variables)
        results.add(CHECK, "Device", text=_described_device(setting))
        parts = chosen(options)
        while parts:
            seconds, start = limit_s(parts, end - time.time(), setting.is_toy), time.time()
            part = parts.pop(0)
            _say(f"{part.name}, at most {seconds:.0f} s")
            how, why = run_part(part, setting, variables, seconds) if seconds > 1 else (KILLED, {"why": "no time left"})
            results.add(part.name, ENDED, how, seconds=round(time.time() - start, 1), **why)


def _described_device(setting: Setting) -> str:
    if setting.is_simulated:
        return "the simulated one, with small models: no time says anything."
    forks = "" if setting.can_fork else " Forked processes can't use it."
    if setting.device == "cuda":
        return f"a GPU.{forks}"
    return "none: small models on the CPU. No time says anything of a GPU."


def _say(text: str) -> None:
    sys.stderr.write(f"{datetime.datetime.now():%H:%M:%S} {text}\n")


def _stop(signum: int, frame: FrameType | None) -> None:
    raise StoppedError(f"told to stop by {signal.Signals(signum).name}")


def _shorten_console(folder: Path) -> None:
    """Keep the end of what the parts printed."""
    path = folder / CONSOLE
    if path.exists() and path.stat().st_size > MOST_CONSOLE_BYTES:
        path.write_bytes(path.read_bytes()[-MOST_CONSOLE_BYTES:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; return 0 unless it was told to stop."""
    options = parse(arguments)
    if options.list or options.budget_of_parts:
        sys.stdout.write("\n".join(described(chosen(options), 60 * options.minutes - END_S)) + "\n")
        return 0
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    results, code = Results(options.out), 0
    results.add(CHECK, "Command", text=f"`python benchmarks/gpu_check.py {' '.join(sys.argv[1:])}`, commit {commit()}")
    try:
        check(options, results)
    except StoppedError as error:
        results.add(CHECK, "Stopped", text=str(error))
        code = 1
    _shorten_console(options.out)
    sys.stdout.write((options.out / REPORT).read_text())
    return code


if __name__ == "__main__":
    sys.exit(main())

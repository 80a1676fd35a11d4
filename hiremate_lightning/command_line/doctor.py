"""Checks an installation: versions, imports of installed packages, solvers, devices, and a small plan."""

from __future__ import annotations

import copy
import platform
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, requires, version

import torch
from packaging.requirements import Requirement
from torch import nn

from .. import torch_private
from ..api import get_plan, hiremate, remove_hiremate
from ..calls.refused import refuse
from ..calls.replaced import checkpointed_modules, take_compiled
from ..errors import ConfigurationError, HiRemateError
from ..integrations.alive import Alive
from ..integrations.any_script import Finder
from ..memory.allocator import free_host_bytes
from ..planning.solvers.base import Status
from ..planning.solvers.mip_backend import BACKENDS
from ..planning.solvers.worker import MENDING, backend_failure
from ..torch_private import hacks, tensor_state
from ..units import format_bytes, format_ratio
from .factory import Workload
from .user_code import find_factory, import_failures, run_script

PACKAGE = "hiremate-lightning"
CALLBACKS = "hiremate_lightning.callbacks"
MODULES = {"scikit-image": "skimage"}  # of distributions whose module has another name
WITHOUT = ("dev", "docs")  # extras that only this repository needs
STEPS = 4  # the first is recorded, the second planned; two more run the plan


class Grade(str, Enum):
    """What a finding means."""

    GOOD = "ok"
    KNOW = "note"  # no problem, but worth knowing
    BAD = "BAD"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: its subject, its result, and what the result means."""

    name: str
    verdict: Grade
    words: str


def examine(factory: str | None = None, script: Sequence[str] = ()) -> list[Finding]:
    """Check this installation; if a factory or a script is given, also check whether its model would be refused."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    findings = [Finding("python", Grade.GOOD, python), torch_finding(), *packages(), *known_bad_pairs()]
    findings += [*solvers(), *_devices()]
    findings += map(small_plan_finding, ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
    if factory is not None:
        findings.append(model_finding(factory))
    if script:
        findings.append(script_finding(script))
    return findings


# ---------------------------------------------------------------- versions


def installed_version(name: str) -> str | None:
    """Return the version of a package, None if it isn't installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def torch_finding() -> Finding:
    """Compare the version of torch with the tested ones, and name the features that it turns off."""
    names = ", ".join(hack.name for hack in hacks.off())
    if hacks.RELEASE in torch_private.CHECKED_VERSIONS:
        words = f"all private interfaces are there{f'; off in this release: {names}' * bool(names)}"
        return Finding("torch", Grade.GOOD, f"{torch.__version__}; {words}")
    checked = ", ".join(torch_private.CHECKED_VERSIONS)
    words = f"{torch.__version__} was not tried (only {checked}); code is captured plainly, without: {names}"
    return Finding("torch", Grade.KNOW, words)


def packages() -> Iterator[Finding]:
    """Import each required package, and Lightning's callbacks, which need most of them."""
    try:
        requirements = [Requirement(line) for line in requires(PACKAGE) or []]
    except PackageNotFoundError:
        requirements = []
        yield Finding(PACKAGE, Grade.KNOW, "used from a checkout, not installed: requirements are not known")
    extras = {wanted: "".join(re.findall(r'extra == "(\w+)"', str(wanted.marker))) for wanted in requirements}
    named = [(wanted, extra) for wanted, extra in extras.items() if wanted.name != "torch" and extra not in WITHOUT]
    modules = {
        wanted.name: MODULES.get(wanted.name, wanted.name.replace("-", "_"))
        for wanted, _ in named
        if installed_version(wanted.name) is not None
    }
    failures = import_failures([*modules.values(), CALLBACKS])
    for wanted, extra in named:
        yield _package(wanted, extra, installed_version(wanted.name), failures.get(modules.get(wanted.name, "")))
    if CALLBACKS in failures:
        mending = f"mend it with: {_mending(PACKAGE)}" if len(failures) == 1 else "mend what is BAD above"
        yield Finding(CALLBACKS, Grade.BAD, f"can't be imported: {failures[CALLBACKS]}; {mending}")
    else:
        yield Finding(CALLBACKS, Grade.GOOD, "can be imported")


def _package(requirement: Requirement, extra: str, installed: str | None, failure: str | None) -> Finding:
    """Compare an installed version with a requirement; a package of an extra may be missing."""
    name, wanted = requirement.name, requirement.specifier
    grade, words = Grade.KNOW if extra else Grade.BAD, f", for the extra {extra}" if extra else ""
    mending = "" if extra else f'; mend it with: pip install "{name}{wanted}"'
    if installed is None:
        return Finding(name, grade, f"not installed{words} (wanted {wanted or 'any version'}){mending}")
    if wanted.contains(installed, prereleases=True):
        grade, words = Grade.GOOD, installed
    else:
        words = f"{installed}, but {wanted} is wanted{words}{mending}"
    if failure is None:
        return Finding(name, grade, words)
    words += f", but can't be imported: {failure}"
    if extra and failure.startswith(ModuleNotFoundError.__name__):
        return Finding(name, Grade.KNOW, words)
    return Finding(name, Grade.BAD, f"{words}; mend it with: {_mending(name)}")


def _mending(name: str) -> str:
    """Return the command that repairs a package which can't be imported."""
    if name == "torchvision":
        # Since torchvision 0.15 for torch 2.0, each release is built for one release of torch.
        fitting = int(torch.__version__.split(".")[1]) + 15
        return (
            f'pip install --force-reinstall --no-deps "torchvision==0.{fitting}.*" from where torch came from, or, if '
            "nothing of yours needs it: pip uninstall torchvision"
        )
    return f"pip install --force-reinstall --no-deps {name}"


KNOWN_BAD = {
    ("lightning<2.6.7", "torch>=2.12"): (
        "torch.compile of a whole LightningModule whose training_step calls self.log fails in this pair of versions; "
        "plans don't do that, but your script may"
    ),
}


def known_bad_pairs() -> Iterator[Finding]:
    """Yield pairs of installed versions that fail together."""
    for pair, words in KNOWN_BAD.items():
        bounds = [(bound, installed_version(bound.name) or "") for bound in map(Requirement, pair)]
        if all(installed and bound.specifier.contains(installed, prereleases=True) for bound, installed in bounds):
            yield Finding(" and ".join(f"{bound.name} {installed}" for bound, installed in bounds), Grade.KNOW, words)


# ---------------------------------------------------------------- solvers and devices


def solvers() -> Iterator[Finding]:
    """Solve a small integer program with each MIP solver in the worker; planning needs one that works."""
    failures = {name: backend_failure(name) for name in BACKENDS}
    lacking = Grade.BAD if all(failures.values()) else Grade.KNOW
    for name, failure in failures.items():
        mending = f"; mend it with: {MENDING}" if name == BACKENDS[0] else ""
        words = f"{failure}{mending}" if failure else "solves a small integer program"
        yield Finding(f"solver {name}", lacking if failure else Grade.GOOD, words)


def _devices() -> Iterator[Finding]:
    free, threads = format_bytes(free_host_bytes()), torch.get_num_threads()
    yield Finding("cpu", Grade.GOOD, f"{threads} thread{'s' * (threads > 1)}, {free} free")
    if not torch.backends.cuda.is_built():
        yield Finding("cuda", Grade.KNOW, "this torch is built without it; `hiremate plan --device cuda` still works")
    elif not torch.cuda.is_available():
        yield Finding("cuda", Grade.KNOW, "no device")
    for index in range(torch.cuda.device_count()):
        free_bytes, all_bytes = torch.cuda.mem_get_info(index)
        memory = f"{format_bytes(free_bytes)} of {format_bytes(all_bytes)} free"
        yield Finding(f"cuda:{index}", Grade.GOOD, f"{torch.cuda.get_device_name(index)}, {memory}")


def small_plan_finding(device: str) -> Finding:
    """Train a small model on a device, and report errors."""
    name = f"small plan on {device}"
    try:
        return Finding(name, Grade.GOOD, small_plan(device))
    except Exception as error:  # any error is a fault of the installation to report
        line = next(iter(str(error).splitlines()), "")
        return Finding(name, Grade.BAD, f"{type(error).__name__}: {line}")


def small_plan(device: str) -> str:
    """Train a small model with and without a plan, and compare.

    Raises:
        RuntimeError: If there is no plan, the plan was not solved, or gradients differ in any bit.
    """
    with torch.random.fork_rng(devices=[0] if device == "cuda" else []):
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(6))
        plain = nn.Sequential(*blocks).to(device)
        batch = torch.randn(1024, 64, device=device)
    planned = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hiremate(planned, budget="60%", time_limit_s=5, verbose=False)
        try:
            for _ in range(STEPS):
                for model in (plain, planned):
                    model.zero_grad()
                    model(batch).square().mean().backward()
            plan = get_plan(planned)
        finally:
            remove_hiremate(planned)
    if plan is None:
        raise RuntimeError(f"no plan was made in {STEPS} steps")
    if plan.solution.status is not Status.OPTIMAL and not plan.solution.bound_ms:
        raise RuntimeError(f"no plan was solved ({plan.solution.stopped_by}), only the least memory found")
    gradients = [(p.grad, q.grad) for p, q in zip(plain.parameters(), planned.parameters(), strict=True)]
    if not all(one is not None and other is not None and torch.equal(one, other) for one, other in gradients):
        raise RuntimeError("gradients of the planned step are not those of the plain one")
    peak = f"{format_bytes(plan.unplanned_peak_bytes)} -> {format_bytes(plan.planned_peak_bytes)}"
    return f"peak {peak}, extra time {format_ratio(plan.predicted_overhead)}, gradients equal bit for bit"


def model_finding(factory: str) -> Finding:
    """Report whether a model would be refused."""
    try:
        with tensor_state.fake_mode():
            module = Workload(find_factory(factory), factory).make().module
            refuse(module)
    except ConfigurationError as error:
        return Finding(factory, Grade.BAD, str(error))
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    if not trained:
        return Finding(factory, Grade.BAD, f"{type(module).__name__} has no parameter to train")
    return Finding(factory, Grade.GOOD, f"{type(module).__name__}, {trained:,} parameters to train: not refused")


class _Looking(Finder):
    """Finds the model that a script trains, and stops the script before it trains."""

    words = ""  # description of the training found

    def _plan(self, root: nn.Module, alive: Alive) -> None:
        take_compiled(root)
        refuse(root)
        trained = sum(p.numel() for p in root.parameters() if p.requires_grad)
        optimizers = " and ".join(sorted({type(o).__name__ for o in alive.optimizers_of(root)})) or "no optimizer yet"
        checkpointed = checkpointed_modules(root)
        instead = f"; the plan replaces activation checkpointing of {checkpointed} modules" if checkpointed else ""
        self.words = (
            f"{type(root).__name__}, {trained:,} parameters to train ({optimizers}): not refused{instead}. Stopped "
            "before its first step; `hiremate run --dry-run` trains two and says what a plan costs"
        )
        raise SystemExit(0)  # ends the script


def script_finding(command: Sequence[str]) -> Finding:
    """Run a script up to its first training step, and report whether its model would be refused."""
    name, finder = command[0], _Looking("auto")
    try:
        with finder.in_place():
            run_script(command, is_module=False)
    except HiRemateError as error:
        return Finding(name, Grade.BAD, str(error))
    except SystemExit as stop:
        if stop.code:
            return Finding(name, Grade.BAD, f"it ended before its first training step, with code {stop.code}")
    except Exception as error:  # the script may raise anything
        words = f"it failed before its first training step, {type(error).__name__}: {error}"
        return Finding(name, Grade.BAD, words)
    if finder.words:
        return Finding(name, Grade.GOOD, finder.words)
    return Finding(name, Grade.KNOW, f"no training step was seen: {finder.seen.reason}")

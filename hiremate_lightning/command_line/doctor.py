"""Examine an installation: versions, imports of installed packages, solvers, devices, and a small plan."""

from __future__ import annotations

import copy
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version

import torch
from packaging.requirements import Requirement
from torch import nn

from .. import torch_private
from ..api import get_plan, hiremate, remove_hiremate
from ..calls.refusals import refuse
from ..calls.replaced import checkpointed_modules
from ..errors import ConfigurationError, HiRemateError
from ..integrations.any_script import Alive, Finder
from ..integrations.compiled_in_place import take_aside
from ..memory.allocator import free_host_bytes
from ..planning.solvers import Status
from ..planning.solvers.mip_backend import BACKENDS
from ..planning.solvers.worker import MENDING, backend_failure
from ..torch_private import hacks, tensor_state
from ..units import format_bytes, format_ratio
from .factory import Workload, find_factory
from .importing import import_failures
from .script import Script

PACKAGE = "hiremate-lightning"
CALLBACKS = "hiremate_lightning.callbacks"
MODULES = {"scikit-image": "skimage"}  # of distributions that have another name
WITHOUT = ("dev", "docs")  # extras that only this repository needs
STEPS = 4  # the first is recorded, the second planned; two more run the plan


class Grade(str, Enum):
    """What a finding means."""

    GOOD = "ok"
    KNOW = "note"  # works, but is good to know
    BAD = "BAD"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What was looked at.
        verdict: What it means.
        words: What was found.
    """

    name: str
    verdict: Grade
    words: str


def examine(factory: str | None = None, script: Sequence[str] = ()) -> list[Finding]:
    """Examine this installation.

    Args:
        factory: A model as the command line names it, to say whether it would be refused; None for none.
        script: A training script and its arguments, to run up to its first training step; empty for none.
    """
    findings = [_python(), _torch(), *_importable(list(_requirements())), *_known_bad_pairs(), *_solvers(), *_devices()]
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    findings += [_attempt(f"small plan on {device}", partial(small_plan, device)) for device in devices]
    if factory is not None:
        findings.append(_model(factory))
    if script:
        findings.append(_script(script))
    return findings


def _attempt(name: str, look: Callable[[], str]) -> Finding:
    """Run a check that fails by raising."""
    try:
        return Finding(name, Grade.GOOD, look())
    except Exception as error:  # whatever is wrong with the installation is what is to be found
        line = next(iter(str(error).splitlines()), "")
        return Finding(name, Grade.BAD, f"{type(error).__name__}: {line}")


# ---------------------------------------------------------------- versions


def _python() -> Finding:
    words = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", Grade.GOOD if sys.version_info >= (3, 10) else Grade.BAD, words)


def _torch() -> Finding:
    """Compare the version of torch with those tested, and name what is off because of it."""
    names = ", ".join(hack.name for hack in hacks.off())
    if hacks.is_tried():
        words = f"all private interfaces are there{f'; off in this release: {names}' * bool(names)}"
        return Finding("torch", Grade.GOOD, f"{torch.__version__}; {words}")
    checked = ", ".join(torch_private.CHECKED_VERSIONS)
    words = f"{torch.__version__} was not tried (only {checked}); code is captured plainly, without: {names}"
    return Finding("torch", Grade.KNOW, words)


def _requirements() -> Iterator[Finding]:
    """Compare what is installed with what the package asks for."""
    try:
        asked_for = _asked_for()
    except PackageNotFoundError:
        yield Finding(PACKAGE, Grade.KNOW, "used from a checkout, not installed: requirements are not known")
        return
    for requirement, extra in asked_for:
        if requirement.name != "torch":
            yield _requirement(requirement, extra)


def _asked_for() -> list[tuple[Requirement, str]]:
    """List what the package asks for, each with the extra that it is for, "" for none.

    Raises:
        PackageNotFoundError: If the package is not installed.
    """
    found = [(Requirement(line), re.search(r'extra == "(\w+)"', line)) for line in requires(PACKAGE) or []]
    named = [(requirement, extra[1] if extra else "") for requirement, extra in found]
    return [(requirement, extra) for requirement, extra in named if extra not in WITHOUT]


def _requirement(requirement: Requirement, extra: str) -> Finding:
    name, wanted = requirement.name, requirement.specifier
    lacking = Grade.KNOW if extra else Grade.BAD
    for_extra = f", for the extra {extra}" if extra else ""
    mending = "" if extra else f'; mend it with: pip install "{name}{wanted}"'
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, lacking, f"not installed{for_extra} (wanted {wanted or 'any version'}){mending}")
    if not wanted.contains(found, prereleases=True):
        return Finding(name, lacking, f"{found}, but {wanted} is wanted{for_extra}{mending}")
    return Finding(name, Grade.GOOD, found)


def _importable(findings: list[Finding]) -> Iterator[Finding]:
    """Import each package that is there, and what needs most of them: Lightning's callbacks."""
    there = [finding.name for finding in findings if _is_installed(finding.name)]
    failures = import_failures([*map(_module_of, there), CALLBACKS])
    for finding in findings:
        reason = failures.get(_module_of(finding.name)) if finding.name in there else None
        yield finding if reason is None else _not_importable(finding, reason)
    if CALLBACKS in failures:
        is_alone = len(failures) == 1
        mending = f"mend it with: {_mending(PACKAGE)}" if is_alone else "mend what is BAD above"
        yield Finding(CALLBACKS, Grade.BAD, f"can't be imported: {failures[CALLBACKS]}; {mending}")
    else:
        yield Finding(CALLBACKS, Grade.GOOD, "can be imported")


def _not_importable(finding: Finding, reason: str) -> Finding:
    """Describe a package that can't be imported; a package of an extra may lack a module that nobody asked for."""
    words = f"{finding.words}, but can't be imported: {reason}"
    optional = {requirement.name for requirement, extra in _asked_for() if extra}
    if finding.name in optional and reason.startswith(ModuleNotFoundError.__name__):
        return Finding(finding.name, Grade.KNOW, words)
    return Finding(finding.name, Grade.BAD, f"{words}; mend it with: {_mending(finding.name)}")


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return name != PACKAGE


def _module_of(name: str) -> str:
    return MODULES.get(name, name.replace("-", "_"))


def _mending(name: str) -> str:
    """Return the command that mends a package which can't be imported."""
    if name == "torchvision":
        # Each has been built for one release of torch since torch 2.0, for which it was 0.15.
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


def _known_bad_pairs() -> Iterator[Finding]:
    """Find pairs of versions that fail together."""
    for pair, words in KNOWN_BAD.items():
        bounds = [Requirement(bound) for bound in pair]
        with suppress(PackageNotFoundError):
            if all(bound.specifier.contains(version(bound.name), prereleases=True) for bound in bounds):
                names = " and ".join(f"{bound.name} {version(bound.name)}" for bound in bounds)
                yield Finding(names, Grade.KNOW, words)


# ---------------------------------------------------------------- solvers and devices


def _solvers() -> Iterator[Finding]:
    """Solve a small integer program with each MIP solver, in the process that solves; planning needs one of them."""
    failures = {name: backend_failure(name) for name in BACKENDS}
    lacking = Grade.BAD if all(failures.values()) else Grade.KNOW
    for name, failure in failures.items():
        if failure:
            mending = f"; mend it with: {MENDING}" if name == BACKENDS[0] else ""
            yield Finding(f"solver {name}", lacking, f"{failure}{mending}")
        else:
            yield Finding(f"solver {name}", Grade.GOOD, "solves a small integer program")


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


def small_plan(device: str) -> str:
    """Train a small model with and without a plan, and compare.

    Raises:
        RuntimeError: If there is no plan, none that was solved, or gradients differ in any bit.
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


# ---------------------------------------------------------------- a model


def _model(factory: str) -> Finding:
    """Report whether a model would be refused."""
    try:
        with tensor_state.fake_mode():
            module = Workload(find_factory(factory), factory).module()
            refuse(module)
    except ConfigurationError as error:
        return Finding(factory, Grade.BAD, str(error))
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    if not trained:
        return Finding(factory, Grade.BAD, f"{type(module).__name__} has no parameter to train")
    return Finding(factory, Grade.GOOD, f"{type(module).__name__}, {trained:,} parameters to train: not refused")


# ---------------------------------------------------------------- a script


class _SeenEnough(SystemExit):
    """Ends a script where its first training step would begin."""


class _Looking(Finder):
    """Finds what a script trains, and stops the script before that trains.

    Attributes:
        words: What was found; None before that.
    """

    words: str | None = None

    def _plan(self, root: nn.Module, alive: Alive) -> None:
        take_aside(root)
        refuse(root)
        trained = sum(p.numel() for p in root.parameters() if p.requires_grad)
        optimizers = " and ".join(sorted({type(o).__name__ for o in alive.optimizers_of(root)})) or "no optimizer yet"
        checkpointed = checkpointed_modules(root)
        instead = f"; the plan replaces activation checkpointing of {checkpointed} modules" if checkpointed else ""
        self.words = (
            f"{type(root).__name__}, {trained:,} parameters to train ({optimizers}): not refused{instead}. Stopped "
            "before its first step; `hiremate run --dry-run` trains two and says what a plan costs"
        )
        raise _SeenEnough(0)


def _script(given: Sequence[str]) -> Finding:
    """Run a script up to its first training step, and say whether what it trains would be refused."""
    finder = _Looking("auto")
    try:
        with finder.in_place():
            Script(given, is_module=False).run()
    except _SeenEnough:
        assert finder.words is not None, "it was raised with them"
        return Finding(given[0], Grade.GOOD, finder.words)
    except HiRemateError as error:
        return Finding(given[0], Grade.BAD, str(error))
    except SystemExit as stop:
        if stop.code:
            return Finding(given[0], Grade.BAD, f"it ended before its first training step, with code {stop.code}")
    except Exception as error:  # the script's own code may raise anything
        words = f"it failed before its first training step, {type(error).__name__}: {error}"
        return Finding(given[0], Grade.BAD, words)
    return Finding(given[0], Grade.KNOW, f"no training step was seen: {finder.seen.reason}")

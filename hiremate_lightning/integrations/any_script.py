"""Find the model that a script trains, and plan it as `hiremate()` does, without a change of the script.

While a `Finder` is in place it sees each call of a module whose call is not replaced. The trained module is the
outermost one that is called in training mode, with gradients on, and has a trainable parameter in an optimizer; before
there is an optimizer, it is the first such module without that condition. The Finder plans the outermost module that
contains the trained one, such as a LightningModule, so that all modules trained together have one plan. Wrappers
(DistributedDataParallel, Fabric, torch.compile) stay outside of the plan. Models of other optimizers, as the second
network of a GAN, use the same memory and share the plan. A model that the script plans itself is left to the script.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..api import take_over
from ..calls.replaced import CompiledCall, take_compiled
from ..calls.slots import Slot
from ..errors import ConfigurationError, HiRemateError
from ..housekeeping import Once
from ..objects import parameters_of
from ..planning.plan import Plan
from ..sessions.session import Session
from ..targets.candidates import has_weights
from ..targets.modules import is_inside_planned, planned_module_with, targets_of
from ..targets.together import together
from ..targets.training_step import plans_step_of
from ..torch_private import backward_pass, hooks, runtime, tensor_state
from ..torch_private.hacks import replaced
from .alive import Alive, may_be_planned, name_of
from .compile_backend import hiremate as compile_backend

DRY_STEPS = 2  # least optimizer steps in a dry run: the first step is recorded, the second one runs by the plan
MOST_DRY_STEPS = 8  # most optimizer steps in a dry run, if steps of several signatures alternate
MORE = "hiremate run --html plan.html writes a page at the end"
NOTHING_CALLED = (
    "no module with trainable parameters was called with gradients on in this process. Processes that a script starts "
    "by itself are not planned: start them with torchrun -m hiremate_lightning.run"
)
TRIES = 3  # after 3 calls of a module that can't be planned, try again only after a new optimizer has stepped
LAUNCHED = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


@dataclass(eq=False)
class Trained:
    """A model that was found, with its session and its plan."""

    name: str  # class of the model
    session: weakref.ref[Session]
    plan: Plan | None = None  # the plan of the largest step so far; it stays when the model is gone

    def note(self, plan: Plan) -> None:
        """Store a new or newly measured plan in `plan`, unless the stored one is of a larger step."""
        largest = self.plan
        if largest is None or plan.graph is largest.graph or plan.unplanned_peak_bytes >= largest.unplanned_peak_bytes:
            self.plan = plan


class Unplanned(str, Enum):
    """Why nothing was planned, the most informative reason first; {} is the name of a model, or of an exception."""

    BY_SCRIPT = "the script plans {} by itself"
    ENDED = "the script ended before one, by {}"
    EVAL = "{} was called with gradients on, but in eval mode, which is not planned; call .train() before training"
    TRANSFORMED = "{} was called inside of transforms of torch.func, which are not planned"
    WITHOUT_OPTIMIZER = "no optimizer of torch.optim has the parameters of {}"
    PASSED_BY = (
        "an optimizer stepped, but no call of a module with its parameters was seen. A plan runs where a module is "
        "called; code that is compiled as a whole, or computes with bare parameters, passes it by"
    )


@dataclass
class Sightings:
    """Observations of a script, from which `reason` explains why nothing was planned."""

    updates: int = 0  # optimizer steps
    unplanned: dict[Unplanned, set[str]] = field(default_factory=lambda: {why: set() for why in Unplanned})  # names
    ended_by: str | None = None  # the exception that ended the script, None if it ended without one
    is_stopped: bool = False  # whether a dry run has stopped the script

    @property
    def reason(self) -> str:
        """The most informative reason why nothing was planned."""
        reasons = (why.value.format(" and ".join(sorted(names))) for why, names in self.unplanned.items() if names)
        return next(reasons, NOTHING_CALLED)


class Finder:
    """Finds the models that a script trains, and plans them.

    Args:
        budget: As for `hiremate`.
        target: Paths of the submodules to plan; a model that lacks one of them is not planned.
        options: The other arguments of `hiremate`, by name.
        is_dry: Whether to stop the script once its plans are made and measured.
        report: Shows a line of text.
        more: Sentence that tells how to see more of a plan.
    """

    def __init__(
        self,
        budget: int | float | str,
        target: Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        is_dry: bool = False,
        report: Callable[[str], None] = lambda line: None,
        more: str = MORE,
    ) -> None:
        self._budget, self._target, self._options = budget, target, dict(options or {})
        self._report_once = Once(report)
        self._more = more
        self._is_dry = is_dry
        self._is_launched = any(os.environ.get(name) for name in LAUNCHED)
        self.trained: list[Trained] = []  # the models that were found
        self.seen = Sightings()  # why other models are not planned
        self._is_apart = False  # whether a call is running whose inner calls are ignored
        self._has_ended = False
        self._around: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # wrappers and parts of planned models, no slots
        # Module that could not be planned -> number of optimizers at the latest try, number of tries.
        self._settled: weakref.WeakKeyDictionary[nn.Module, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # those that have stepped

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Watch all calls of modules and steps of optimizers within the block; at its end, remove hooks and plans.

        Processes forked within the block, those of data loaders for example, are not watched.
        """
        process = os.getpid()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return hooks.plain_call(module, *args, **kwargs)
            return self.call(module, partial(hooks.plain_call, module), args, kwargs)

        seeing = ExitStack()
        seeing.callback(register_optimizer_step_post_hook(self._stepped).remove)
        seeing.callback(hooks.on_compile_in_place(self._compiled_in_place))
        hooks.set_call_of_all(call)
        seeing.callback(hooks.set_call_of_all, None)
        seeing.callback(setattr, self, "_has_ended", True)  # runs first, before the hooks are removed
        os.register_at_fork(after_in_child=seeing.close)
        try:
            yield
        except BaseException as error:  # anything that ends a script, also Ctrl-C, is named in the final report
            is_asked = isinstance(error, SystemExit) and not error.code
            words = "the error below" if isinstance(error, HiRemateError) else f"{type(error).__name__}: {error}"
            self.seen.ended_by = None if is_asked else words.rstrip(": ")
            if self.seen.ended_by is not None and not self.seen.updates:
                self.seen.unplanned[Unplanned.ENDED].add(self.seen.ended_by)
            raise
        finally:
            if os.getpid() == process:
                seeing.close()
                for session in self._sessions():
                    session.end_step()
                    session.close()

    def _sessions(self) -> list[Session]:
        """List the sessions of the models that still exist."""
        return [session for trained in self.trained if (session := trained.session()) is not None]

    # ---------------------------------------------------------------- calls

    def call(self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Plan a module if it is the trained one; call it by its plan, or by `run` if it has no plan."""
        if module in self._around:
            return hooks.plain_call(module, *args, **kwargs)
        is_training = torch.is_grad_enabled() and not torch.jit.is_tracing() and not backward_pass.is_running()
        if self._has_ended or self._is_apart or not is_training or is_inside_planned():
            return run(*args, **kwargs)
        if not has_weights(module):
            is_frozen = any(True for _ in module.parameters())  # a module without parameters may call trained ones
            return self._call_apart(run, args, kwargs) if is_frozen else run(*args, **kwargs)
        if not module.training:
            if not self.seen.unplanned[Unplanned.EVAL]:  # name only the outermost module of the first such call
                self.seen.unplanned[Unplanned.EVAL].add(name_of(module))
            return run(*args, **kwargs)
        if not self._ensure_planned(module):
            return self._call_apart(run, args, kwargs)
        slot = hooks.get_call(module)
        if isinstance(slot, Slot):
            return slot(*args, **kwargs)
        self._around.add(module)  # skip it from now on: it calls the planned module
        return hooks.plain_call(module, *args, **kwargs)

    def _call_apart(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module and ignore the calls inside of it."""
        with replaced((self, "_is_apart", True)):
            return run(*args, **kwargs)

    def _compiled_in_place(self, module: nn.Module, before: Any, compiled: Callable[..., Any], backend: Any) -> Any:
        """Return the call of a module that the script compiles in place; a module that has a plan keeps it."""
        if backend in ("hiremate", compile_backend):
            self.leave_to_script(name_of(module))
            return compiled
        call = CompiledCall(self.call, module, compiled)
        for session in self._sessions():
            if any(inner is module for inner in session.root.modules()):
                session.replace_compiling([partial(hooks.set_call, module, call)])
                return before
        return call

    def _ensure_planned(self, module: nn.Module) -> bool:
        """Plan a module, unless `TRIES` attempts failed with the present optimizers; return whether it is planned."""
        optimizers, tries = self._settled.get(module, (0, 0))
        if tries >= TRIES and optimizers == len(self._optimizers):
            return False
        if tensor_state.is_transforming():
            self.seen.unplanned[Unplanned.TRANSFORMED].add(name_of(module))
            return False
        is_planned = self._plan_around(module)
        if not is_planned:
            self._settled[module] = len(self._optimizers), tries + 1
        return is_planned

    def _plan_around(self, module: nn.Module) -> bool:
        """Plan the model that a module belongs to; return whether it is planned."""
        alive = Alive()
        root = alive.model_around(module)
        planned = targets_of(root)
        if planned is not None:
            if planned.gives_way is not None:
                planned.attach()  # also to modules that were added since
            return planned.gives_way is not None
        if plans_step_of(root) or alive.is_compiled_by_script(root):
            self.leave_to_script(name_of(root))
            return False
        if alive.optimizers and not alive.knows(module):
            self.seen.unplanned[Unplanned.WITHOUT_OPTIMIZER].add(name_of(root))
            return False
        if not alive.knows(module) and not may_be_planned(root):  # for example a trial export before training
            return False
        paths = dict(root.named_modules())
        missing = next((path for path in self._target or () if path not in paths), None)
        if missing is not None:
            self._report_once(f"{name_of(root)} has no submodule {missing!r} (--target): it is not planned")
            return False
        self._refuse_unplanned_ranks()
        self._plan(root if self._target else together([root, *alive.others_trained(root)]), alive)
        return True

    def _plan(self, root: nn.Module, alive: Alive) -> None:
        compiled = take_compiled(root)
        planned = take_over(root, self._budget, target=self._target, **self._options)
        planned.gives_way = partial(self.leave_to_script, name_of(root))
        session = planned.session
        for optimizer in alive.optimizers_of(root):
            session.watch_optimizer(optimizer)
        session.reporter.more = self._more
        session.replace_compiling(compiled)
        trained = Trained(name_of(root), weakref.ref(session))
        session.listeners.append(trained.note)
        self.trained.append(trained)

    def _refuse_unplanned_ranks(self) -> None:
        """Raise a ConfigurationError if the script started its other processes itself: these have no plan."""
        count = runtime.world_size()
        if count > 1 and not self._is_launched:
            raise ConfigurationError(
                f"The script trains in {count} processes and has started the others itself, without a plan. Start all "
                f"of them: torchrun --nproc-per-node {count} -m hiremate_lightning.run [options] train.py [arguments]"
            )

    # ---------------------------------------------------------------- optimizers

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count an optimizer step; end a dry run once all plans are measured or `MOST_DRY_STEPS` have run."""
        self._optimizers.add(optimizer)
        self.seen.updates += 1
        parameters = parameters_of(optimizer)
        if not self.trained:
            by_script = planned_module_with(parameters)
            if by_script is not None:
                self.leave_to_script(name_of(by_script))
            else:
                self.seen.unplanned[Unplanned.PASSED_BY].add(type(optimizer).__name__)
        if not self._is_dry or self.seen.updates < DRY_STEPS:
            return
        for session in self._sessions():
            session.end_step()
        plans = [trained.plan for trained in self.trained]
        all_measured = all(plan is not None and plan.measured.peak_bytes is not None for plan in plans)
        if (plans and all_measured) or self.seen.updates >= MOST_DRY_STEPS:
            self.seen.is_stopped = True
            raise SystemExit(0)  # ends the script

    # ---------------------------------------------------------------- messages

    def leave_to_script(self, name: str) -> None:
        """Record that the script plans a model itself, and show this once."""
        self.seen.unplanned[Unplanned.BY_SCRIPT].add(name)
        self._report_once(f"the script plans {name} by itself: that holds, and --budget has no effect on it")

"""Takes over the calls of the modules of a model, found automatically or named, and plans them by a session.

A slot replaces a module's call. A call is planned if its module has trainable parameters and is in training mode,
gradients are on, and no planned call is around it; calls inside of it belong to it. So of a LightningModule the forward
is planned if `training_step` calls it, else the submodules that `training_step` calls. The module's own hooks run
outside of the plan, once; its forward is read at each call, so that patches of it (Accelerate's autocast) count.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..calls.kept_state import BeforeCall
from ..calls.refused import reason_of_others, refuse, refuse_each
from ..calls.slots import Called, InnerSlots, Slot, slot_for
from ..errors import SecondDerivativeError
from ..sessions.messages import transforms_in
from ..sessions.session import Session
from ..torch_private import backward_pass, dynamo, hooks, sharding, tensor_state
from ..torch_private.hacks import replaced, replaced_entries
from .candidates import Candidates, Target, has_weights, parts_with_weights
from .entry_points import Compiler
from .overseeing import (
    check_captured,
    classes_with_code,
    listen_to_optimizers,
    planned_call,
    requires_gradient,
    warned,
)
from .together import options_together, together

REPLACED = 2  # plan a module's parts instead after its assigned forward was replaced so often

_attached: weakref.WeakSet[Targets] = weakref.WeakSet()
_numbers = itertools.count()


class Targets:
    """The slots of one model.

    Attributes:
        root: The model.
        session: Plans what is called.
        candidates: Its modules that may be planned.
        adopted: Modules whose calls are planned, by path, in the order in which they were first called.
        is_inside: Whether a planned call is under way.
        number: Number of the request to plan, in order, the same in all processes.
        gives_way: Called when a user plans this model explicitly; None if it was planned explicitly.
    """

    def __init__(self, root: nn.Module, session: Session, target: Target = None) -> None:
        refuse(root)
        self.root = root
        self.session = session
        self.adopted: dict[str, nn.Module] = {}
        self.candidates = Candidates(root, target)
        self._compiler = Compiler(session)
        # Paths of modules of which something was captured, with the number of calls since of which nothing was.
        self._uncaptured: dict[str, int] = {}
        self._passed_by: set[str] = set()  # paths of modules whose parts are planned in their place
        self._hooked: dict[str, frozenset[str]] = {}  # the kinds of hooks inside of these modules at that time
        self.is_inside = False
        self._is_eager = False  # whether all calls run eager
        self.gives_way: Callable[[], None] | None = None
        self._given_up = 0  # number of functions that Dynamo had given up at the latest search for their modules
        self._latest_break = dynamo.latest_break()  # the latest graph break before this model
        self._uncaptured_parts = set[nn.Module]()  # modules inside of a planned call whose capture failed
        self._uncaptured_kinds = set[type[nn.Module]]()  # classes of modules whose capture failed
        self._trains_others = False  # whether it trains parameters that the root doesn't have
        self._inner_slots = InnerSlots()
        self._around: dict[str, nn.Module] = {}  # modules around the named ones, as `Candidates.holders`
        self._thread = 0  # thread of the latest call
        self.number = next(_numbers)
        self._partner: Targets | None = None  # the model that is called in the same step

    def attach(self) -> None:
        """Take over the calls of all candidates until the session closes; again for modules that were added since."""
        if self not in _attached:
            listen_to_optimizers(self.session)
            self.session.closing.callback(self._leave)
            _attached.add(self)
        self._around = self.candidates.holders()
        for name, module in (self.candidates.by_path() | self._around).items():
            is_inside = any(name == outer or name.startswith(f"{outer}." if outer else "") for outer in self.adopted)
            if name not in self._passed_by and not is_inside and hooks.get_call(module) is None:
                hooks.set_call(module, slot_for(self, name, module))

    def _leave(self) -> None:
        """Leave every module as it was."""
        _attached.discard(self)
        self._inner_slots.clear()
        self.adopted.clear()  # calls may be taken over again: see `attach`
        self._compiler.close()
        for module in self.root.modules():
            if isinstance(hooks.get_call(module), Slot):
                hooks.set_call(module, None)

    @property
    def inner(self) -> set[nn.Module]:
        """The modules that are planned as parts of adopted ones."""
        return {inner for adopted in self.adopted.values() for inner in adopted.modules()}

    def call(self, called: Called) -> Any:
        """Call a candidate: planned if it trains and is outermost, or if uncaptured code calls it."""
        module = called.module
        if self._is_eager or (self.is_inside and self.session.is_eager):
            return called.run()
        if called.path in self._around:  # the step begins before a sharded module gathers its parameters
            if torch.is_grad_enabled() and module.training and sharding.has_units(module):
                self.session.begin_step(called.arguments)
            return called.run()
        if not self._trains(called):
            return self._call_untrained(called)
        if tensor_state.is_transforming() or not module.training:
            self._warn_untrained(called)
            return self._call_untrained(called)
        if self.is_inside:
            return self._call_inside(called)
        if (joined := self._join()) is not None:
            path = next(path for path, inner in joined.root.named_modules() if inner is module)
            return joined.call(replace(called, path=path))
        return self._call_outermost(called)

    def _call_outermost(self, called: Called) -> Any:
        """Call an outermost candidate that trains: by a plan, unless it can't be planned or the plan gains nothing."""
        path, module = called.path, called.module
        if self.session.leaves_out(path, called.arguments, is_part=module in self._inner_slots):
            with replaced((self, "_is_eager", True)):  # all modules that it calls run unobserved too
                return called.run()
        if path not in self.adopted and sharding.has_units_below(module):
            self._passed_by.add(path)
        self._take_back(called)
        if path in self._passed_by:  # code that it runs before the first planned part belongs to the step
            if self.session.begin_call(path, called.arguments, module.forward) and self.session.is_given_back:
                return self._call_eager(called)
            return self._or_eager(self._call_passed_by, called)
        if path not in self.adopted:
            if module in self._inner_slots and backward_pass.is_running():
                return called.run()  # a part of a planned call is recomputed
            self._adopt(called)
        with self._inner_slots.away():
            if self.session.begin_call(path, called.arguments, module.forward):
                return self._call_eager(called)
            return self._or_eager(self._call_compiled, called)

    def _join(self) -> Targets | None:
        """Join with a model that trains in the same step, once no graph waits; return None if there is none."""
        self._thread = threading.get_ident()
        if backward_pass.is_running():
            return None
        attached = list(_attached) if self._partner is None and len(_attached) > 1 else []
        if beside := [other for other in attached if other._is_beside(self)]:
            self._partner = min(beside, key=lambda other: other.number)
            self._partner._partner = self
        other = self._partner
        if other is None or other not in _attached or other.session.holds_graphs or self.session.holds_graphs:
            return None
        return self._joined_with(other)

    def _joined_with(self, other: Targets) -> Targets:
        """Plan two models as one, in place of their own plans.

        Each of these would count the other model's memory as it was by chance, and could not lower it.
        """
        options = options_together(other.session.options, self.session.options)
        assert options is not None, "only such models are partners"
        apart = sorted((other, self), key=lambda targets: targets.number)
        root = together([before.root for before in apart])
        session = Session(root, options)
        for before in apart:
            session.inherit(before.session)
            before.session.close()
        joined = Targets(root, session)
        joined.number = apart[0].number
        joined.attach()
        session.reporter.report(
            f"HiRemate plan of {type(root).__name__}: these models train in the same step, so that they have one plan, "
            f"with the budget {options.budget}"
        )
        return joined

    def _is_beside(self, other: Targets) -> bool:
        """Whether its forwards wait for their backward while another model is called, and both can have one plan."""
        is_free = self is not other and not self.is_inside and self._thread == other._thread
        are_whole = self.candidates.are_all and other.candidates.are_all and self.gives_way is None is other.gives_way
        if not (is_free and are_whole and self.session.holds_graphs):
            return False
        return options_together(self.session.options, other.session.options) is not None

    def call_copy(self, called: Called) -> Any:
        """Call a copy of a candidate eager, since it has weights of its own; warn if it trains."""
        if torch.is_grad_enabled() and has_weights(called.module):
            self.session.warn(
                f"A copy of {called.name} was called that shares its attributes, as learn2learn's "
                "clone makes it: copies run without a plan, in the memory of plain PyTorch. Call the model itself, "
                "with torch.func.functional_call for other weights.",
                topic="copies",
            )
        return called.run()

    def _call_eager(self, called: Called) -> Any:
        """Call a module, and all modules that it calls, in an eager step."""
        with replaced((self, "is_inside", True)):
            return self.session.run_eager(called.arguments, called.run)

    def _or_eager(self, call: Callable[[Called], Any], called: Called) -> Any:
        """Call a module; if it takes a gradient of captured code with create_graph=True, run the model eager from then.

        This shows only when that gradient is computed, in the middle of the forward. So the forward is called again.
        """
        before = None if self.session.captured_count else BeforeCall(called)
        try:
            return call(called)
        except SecondDerivativeError:
            if before is None or backward_pass.is_running() or not before.can_be_restored:
                raise
        self.session.abandon_step()
        self._is_eager = True
        warned.add(self.session)
        self.session.warn(
            f"{called.name} runs without a plan: it trains on a gradient that it takes in its forward "
            f"(create_graph=True), and torch.compile can't capture all that is between.{self.session.why_uncaptured()}"
        )
        return before.restore().run()

    def _call_compiled(self, called: Called) -> Any:
        path, module, before = called.path, called.module, self.session.runs
        with planned_call(self.session, called.name, module), self._in_place(module):
            result = called.run()
        if self.session.runs != before:
            self._uncaptured[path] = 0
            self._plan_what_given_up_code_calls(module)
            self._plan_what_new_forwards_call(called)
        elif path in self._uncaptured and requires_gradient(result):
            self._uncaptured[path] += 1
            is_due = self._uncaptured[path].bit_count() == 1  # after 1, 2, 4, 8 such calls: the cause may be gone
            if is_due and not classes_with_code(result):
                self._compiler.forget(module)
            check_captured(self.session, called.name, result)
        elif not self._plan_parts_of(called, result):
            check_captured(self.session, called.name, result)
        return result

    def _call_passed_by(self, called: Called) -> Any:
        """Call a module whose parts are planned in its place; refuse if no part could be, and none is left to try."""
        before = len(self._passed_by)
        result = called.run()
        if called.module is self.root and not self.session.captured_count and len(self._passed_by) == before:
            check_captured(self.session, called.name, result)
        return result

    def _call_inside(self, called: Called) -> Any:
        """Call a candidate from uncaptured code inside of a planned call: it becomes a graph of its own."""
        before, module = self.session.runs, called.module
        with self._in_place(module):
            result = called.run()
        if self.session.runs == before and requires_gradient(result):
            hooks.set_call(module, None)
            self._uncaptured_parts.add(module)
            self._warn_uncaptured(called.path, type(module))
        return result

    def _warn_uncaptured(self, name: str, kind: type[nn.Module]) -> None:
        if kind in self._uncaptured_kinds:
            self.session.warn(f"Other modules of the class {kind.__name__} could not be captured either.")
        else:
            self._uncaptured_kinds.add(kind)
            self.session.warn(f"{name} could not be captured and runs without a plan, beside what is planned.")

    def _plan_what_given_up_code_calls(self, module: nn.Module) -> None:
        """Capture the uncaptured modules below a module whose forward Dynamo gave up, each as a graph of its own.

        Dynamo captures functions that such a forward calls, but not modules of torch itself.
        """
        given_up, read = dynamo.given_up_count(), self.session.parameters_of_step
        if given_up == self._given_up or read is None:
            return
        self._given_up = given_up
        paths = {m: path for path, m in self.root.named_modules()}
        for outer in [m for m in module.modules() if dynamo.gave_up(m, self._latest_break)]:
            below = (m for m in outer.modules() if m is not outer and hooks.get_call(m) is None)
            missed = [m for m in below if m not in self._uncaptured_parts and has_weights(m, besides=read)]
            for inner in missed:
                hooks.set_call(inner, slot_for(self, paths[inner], inner))
            if missed:
                self.session.abandon_step()
                where = paths[outer] or type(outer).__name__
                self._warn_split(f"{where} was not captured", type(outer))

    def _plan_what_new_forwards_call(self, called: Called) -> None:
        """Plan the parts of a module to which a new forward is assigned for each call, from the next step on.

        Else each new forward would be captured again. It then runs uncaptured around the planned parts.
        """
        is_replaced = self._compiler.replaced[called.module] >= REPLACED
        if is_replaced and (parts := parts_with_weights(called.path, called.module)):
            self.session.warn(
                f"{called.name} gets another forward again and again, which is captured anew each time; from the next "
                "step on its parts are planned."
            )
            self._plan_instead(called, parts)

    def _plan_parts_of(self, called: Called, result: Any) -> bool:
        """Plan the parts of a module of which nothing was captured, from the next step on.

        For example, Dynamo gives up a forward with a graph break in a loop, such as that of torch.nn.Sequential.

        Returns:
            Whether the call is accepted: the module has parts, or is a part itself, or doesn't train.
        """
        if not requires_gradient(result):
            return True
        parts, module = parts_with_weights(called.path, called.module), called.module
        if parts:
            if not self.session.has_warned_of_transforms(called.name):  # parts may be called inside of these too
                self._warn_split(f"Nothing of {called.name} was captured", type(module))
        elif self._passed_by or self.candidates.has_others_than(module):
            self._warn_uncaptured(called.name, type(module))
        else:
            return False
        if parts or self.session.captured_count:
            warned.add(self.session)
        self._plan_instead(called, parts)
        return True

    def _warn_split(self, what: str, kind: type[nn.Module]) -> None:
        """Warn, once for each class, that parts of a module are planned in its place."""
        text = f"{what} as a whole; from the next step on its parts are planned.{self.session.why_uncaptured()}"
        self.session.warn(text, topic=f"split {kind.__qualname__}")

    def _plan_instead(self, called: Called, parts: Mapping[str, nn.Module]) -> None:
        """Plan the parts of a module in its place."""
        if parts:
            self.session.abandon_step()
        self._passed_by.add(called.path)
        self._hooked.setdefault(called.path, hooks.kinds_in(called.module))
        self.adopted.pop(called.path, None)
        for path, part in parts.items():
            if hooks.get_call(part) is None:
                hooks.set_call(part, slot_for(self, path, part))

    def _take_back(self, called: Called) -> None:
        """Plan a module as a whole again, once, if hooks that split it, such as a debugger's, were removed."""
        hooked = self._hooked.get(called.path)
        if not hooked or hooked <= hooks.kinds_in(called.module):
            return
        self._hooked[called.path] = frozenset()
        self._passed_by.discard(called.path)
        self._compiler.forget(called.module)
        inner = set(called.module.modules())
        self.adopted = {path: part for path, part in self.adopted.items() if part not in inner}

    def _trains(self, called: Called) -> bool:
        """Whether a backward of a call reaches trained tensors, in training or eval mode."""
        if not torch.is_grad_enabled() or isinstance(called.module, torch.jit.ScriptModule):
            return False
        return has_weights(called.module) or (called.module is self.root and self._is_reached(called))

    def _warn_untrained(self, called: Called) -> None:
        """Warn, once, of a call with gradients that has no plan: inside of a transform or in eval mode."""
        warned.add(self.session)
        if tensor_state.is_transforming():
            kind = type(self.root).__name__
            self.session.warn(
                f"{kind} was called inside of a transform of torch.func, or of forward-mode differentiation: such "
                "calls are not planned.",
                topic=transforms_in(kind),
            )
        else:
            self.session.warn(
                f"{called.name} was called with gradients but in eval mode: such calls are not "
                "planned. Call .train() to plan them.",
                topic="eval mode",
            )

    def _call_untrained(self, called: Called) -> Any:
        """Call a candidate without a plan; measure an outermost call in training mode without gradients.

        Inside of a transform nothing is measured, since tensors have no memory.
        """
        is_outermost = not (torch.is_grad_enabled() or self.is_inside or tensor_state.is_transforming())
        if is_outermost and called.module.training and has_weights(called.module):
            self.session.begin_without_gradients(called.path, called.arguments)
        result = called.run()
        if called.module is self.root:
            self._learn_of_others_weights(called, result)
        return result

    def _is_reached(self, called: Called) -> bool:
        """Whether gradients flow through the root, though it may have no weights."""
        return self._trains_others or requires_gradient(called.arguments)

    def _learn_of_others_weights(self, called: Called, result: Any) -> None:
        """Plan a root without trained parameters from the next call on, if its result requires gradients."""
        if not (self.root.training and requires_gradient(result)) or has_weights(self.root):
            return
        if not self._is_reached(called):
            self._trains_others = True
            self.session.warn(
                f"{type(self.root).__name__} needs gradients, but none of its parameters does, as where layers are in "
                "a plain list: this call ran without a plan, the next ones are planned. nn.ModuleList makes such "
                "layers part of a module."
            )

    def _adopt(self, called: Called) -> None:
        """Plan a module's calls from now on; slots of its submodules see only calls outside of it."""
        refuse_each(self.root, reason_of_others)  # other tools may have changed modules since `attach`
        self.adopted[called.path] = called.module
        self._inner_slots.pop(called.module, None)
        adopted = set(map(id, self.adopted.values()))
        for inner in called.module.modules():
            slot = hooks.get_call(inner)
            if id(inner) not in adopted and isinstance(slot, Slot):
                self._inner_slots[inner] = slot
                hooks.set_call(inner, None)

    @contextmanager
    def _in_place(self, module: nn.Module) -> Iterator[None]:
        """Replace the module's forward by the compiled one during one call, also if the module calls itself."""
        compiled, slot = self._compiler.forward_of(module), hooks.get_call(module)
        hooks.set_call(module, None)
        try:
            with replaced((self, "is_inside", True)), replaced_entries(module.__dict__, {"forward": compiled}):
                yield
        finally:
            if self in _attached:
                hooks.set_call(module, slot)


def planned_module_with(parameters: Sequence[torch.Tensor]) -> nn.Module | None:
    """Return a module whose calls are planned and which has any of the parameters; None for none."""
    parameter_ids = {id(p) for p in parameters}
    for planned in list(_attached):
        for module in planned.root.modules():
            if isinstance(hooks.get_call(module), Slot) and any(id(p) in parameter_ids for p in module.parameters()):
                return module
    return None


def is_inside_planned() -> bool:
    """Whether a planned call is under way."""
    return any(planned.is_inside for planned in _attached)


def give_way(root: nn.Module) -> None:
    """Stop planning models that were planned automatically, in or around a model that a user plans now."""
    modules = set(root.modules())
    for planned in list(_attached):
        if planned.gives_way is not None and not modules.isdisjoint(planned.root.modules()):
            planned.session.close()
            planned.gives_way()


def targets_of(module: nn.Module) -> Targets | None:
    """Return the targets that plan calls of a module, or of a module in it or around it; None for none."""
    modules = list(module.modules())
    slots = (hooks.get_call(inner) for inner in modules)
    callers = [slot.targets for slot in slots if isinstance(slot, Slot)]
    callers += [planned for planned in list(_attached) if not planned.inner.isdisjoint(modules)]
    return next((caller for caller in callers if isinstance(caller, Targets)), None)

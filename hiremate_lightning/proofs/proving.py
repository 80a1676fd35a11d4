"""Proof of captured code at its first run, before its numbers are used.

A captured graph does not show what the capture has lost. So each captured code is compared once with the code that
Dynamo has read, run eager: the forward, and the backward if there is memory for it, with or without offloading of its
saved tensors. Both run on the same inputs, which are restored, and must give the same bits. If the outputs that get
gradients are not those that were guessed, the next run proves that backward too. Code that gives other bits runs eager
from then on, and so does code whose capture fails when it first runs.

Differences by rounding are expected, see `docs/limits.md`: they are listed, and the code runs as planned.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks

from ..errors import HiRemateError
from ..housekeeping import Once, collecting_what_it_leaves, log
from ..measuring.operators import has_unsteady
from ..measuring.saved_offload import Files, SavedOffload
from ..memory.metering import unmeasured
from ..options import SessionOptions
from ..records.expressions import SizesDifferError, WrongAtSizesError
from ..records.step import MergedStep
from ..reporting.report import Reporter
from ..rewriting.kernels import FusedKernels
from ..rewriting.nodes import is_collective
from ..running.execution import GraphRuntime
from ..running.program import Program
from ..running.program_at_sizes import ProgramAtSizes, programs_of
from ..torch_private import autocasting, backward_pass, captured_code, tensor_state
from ..torch_private.hacks import replaced
from .differences import Difference, differences
from .proof import Proof, ProofAtSizes, ProofMemory, Proofs, Verdict, proof_memory
from .trials import Trial, TrialOutcome, likely_unused, unused_at

INSIDE = "it has run inside of a backward only"
TRIES = 3  # try to prove gradients in so many runs: memory may be missing in the first one
_NOT_PARTS = re.compile(r"_(?:modules|parameters|buffers)_")


class ProvedModel(Protocol):
    """The attributes of a planned model that proofs use."""

    name: str
    options: SessionOptions
    warn: Callable[..., None]  # warns, once for each text
    reporter: Reporter  # shows proving, and adds up its seconds
    tracing: ExitStack  # times the capture; closed before code is proved
    kernels: FusedKernels | None  # compiled kernels of fused operations; None if nothing is fused
    proofs: Proofs  # the proofs so far


class Prover:
    """Proves the captured code of one session, and keeps the proofs so far.

    Args:
        model: The model.
        program_of: Returns the program of a captured graph that is about to run; its operations are measured by then.
        free_bytes: Returns the bytes that the budget of a step, and the device, leave beside existing memory.
    """

    def __init__(
        self,
        model: ProvedModel,
        program_of: Callable[[GraphRuntime], Program],
        free_bytes: Callable[[MergedStep, torch.device], int],
    ) -> None:
        self._model, self._proofs, self._program_of, self._free_bytes = model, model.proofs, program_of, free_bytes
        self._warn_once = Once(log.warning)
        self._at_sizes: weakref.WeakKeyDictionary[ProgramAtSizes, ProofAtSizes] = weakref.WeakKeyDictionary()

    def prove(self, proof: Proof, arguments: Sequence[Any]) -> None:
        """Prove what is unproved of captured code that is about to run, as far as memory is free.

        Each schedule of made code (made from traces of other sizes) is proved once, and again at sizes beyond all
        proofs. If the sizes lie between sizes that were traced or proved, a proof at smaller sizes is enough, which
        takes less time and memory. The proof of made code stays open, since a later step of the same sizes may run by
        another schedule. Without memory for gradients, or inside of a backward, it is enough if another schedule is
        proved, as for traced code.

        Raises:
            SizesDifferError: If the code was made from traces of other sizes, and can't be proved.
        """
        self._proofs.add(proof)
        runtime = proof.runtime
        if runtime is None or runtime.captured.made_from is None:
            self._prove(proof, arguments)
            return
        program, sizes = self._program_of(runtime), runtime.captured.sizes
        programs = programs_of(runtime.captured, program.schedule)
        assert programs is not None, "asked of code that is made from other sizes"
        proof.at_sizes = self._known_of(programs)
        if not proof.at_sizes.holds_at(sizes, runtime.ran_without):
            self._prove_program(proof, runtime, programs, program, arguments)
        if proof.at_sizes.holds_at(sizes, runtime.ran_without):
            proof.forward, proof.backward, proof.rounded, proof.why_unproved = proof.at_sizes.verdicts

    def _known_of(self, programs: ProgramAtSizes) -> ProofAtSizes:
        """Return the proofs of the programs of a schedule."""
        return self._at_sizes.setdefault(programs, ProofAtSizes(programs.sizes))

    def _prove_program(
        self, proof: Proof, runtime: GraphRuntime, programs: ProgramAtSizes, program: Program, arguments: Sequence[Any]
    ) -> None:
        """Prove the program of made code at its sizes, or at smaller ones.

        Raises:
            SizesDifferError: If it can't be proved, and no other program of the code is.
        """
        captured, proved_sizes = runtime.captured, self._known_of(programs)
        programs_of_code = () if captured.made_from is None else captured.made_from.programs.values()
        proofs_of_code = (self._known_of(other) for other in programs_of_code if other is not None)
        is_proved_by_another = any(other.holds_at(captured.sizes) for other in proofs_of_code)
        written, proof.forward, proof.backward = proof.written, Verdict.UNKNOWN, Verdict.UNKNOWN
        if backward_pass.is_running():
            proof.why_unproved = INSIDE
            if is_proved_by_another:
                return
            raise SizesDifferError("Code can't be proved inside of a backward")
        proof.tried_without = set()
        if proved_sizes.encloses(captured.sizes) and not _may_differ_from_itself(runtime, arguments):
            self._prove_smaller(proof, runtime, programs, program, arguments)
        if proved_sizes.holds_at(captured.sizes, runtime.ran_without):
            return
        self._prove(proof, arguments)
        proof.written, proof.rests = written, False
        if proof.is_known:
            proved_sizes.learn(proof, captured.sizes, proof.tried_without)
        elif proved_sizes.holds_at(captured.sizes):  # proved with other missing gradients; no memory to prove these
            proved_sizes.learn(proof, captured.sizes, runtime.ran_without)
        elif proof.forward is Verdict.UNKNOWN or not is_proved_by_another:
            raise SizesDifferError("Programs of sizes that were not traced could not be proved")

    def _prove_smaller(
        self, proof: Proof, runtime: GraphRuntime, programs: ProgramAtSizes, program: Program, arguments: Sequence[Any]
    ) -> None:
        """Prove the code made for smaller sizes, on a slice of each argument; without success the proof stays open."""
        smaller, sliced_arguments = (None if proof.smaller is None else proof.smaller(arguments)) or (None, ())
        if smaller is None or smaller.runtime is None:
            return
        sizes, smaller.runtime.ran_without = smaller.runtime.captured.sizes, runtime.ran_without
        self._prove(smaller, sliced_arguments, replace(programs.at(sizes), protects=program.protects))
        if smaller.is_known:
            self._known_of(programs).learn(smaller, sizes, smaller.tried_without)

    def _prove(self, proof: Proof, arguments: Sequence[Any], made: Program | None = None) -> None:
        """Prove code by the program that it is about to run by, or by `made`, a program for smaller sizes.

        Raises:
            WrongAtSizesError: If made code fails or gives other numbers.
        """
        if backward_pass.is_running():
            proof.why_unproved = INSIDE
            return
        nodes = () if proof.runtime is None else proof.runtime.captured.joint.graph.nodes
        if any(is_collective(str(node.target)) for node in nodes):
            self._leave_unproved(proof, "other processes would wait for what it sends once more")
            return
        composite = next(filter(tensor_state.has_parts, arguments), None)
        if composite is not None:
            self._leave_unproved(proof, f"it gets a {type(composite).__name__}, a tensor that is made of others")
            return
        proof.begin()
        self._model.tracing.close()
        device, runtime, program, memory = _device_of(proof, arguments), proof.runtime, made, None
        if runtime is not None:
            program = program or self._program_of(runtime)
            if _may_differ_from_itself(runtime, arguments):
                self._leave_unproved(proof, "it may give other numbers when it runs once more")
                return
        with self._model.reporter.stage("proving"), unmeasured(device), collecting_what_it_leaves():
            without = proof.next_without()
            if runtime is not None and program is not None:  # code without gradients is proved without a look at memory
                assert runtime.profile is not None, "it is measured before its program is chosen"
                memory = proof_memory(runtime.captured, runtime.profile, program, self._free_bytes)
            if memory is None or memory.has_eager or memory.has_forward:
                proof.why_unproved = ""
                on_trial = [] if runtime is None else [(runtime, "trial", program)]  # run outside of any step
                with replaced(*on_trial), autocasting.not_printed():
                    self._try(proof, arguments, memory, without, needs_numbers=made is not None)
            if not proof.is_known:
                proof.why_unproved = proof.why_unproved or "the budget leaves no memory to compute them in eager mode"
        self._conclude(proof, without)

    def _conclude(self, proof: Proof, without: frozenset[int] | None) -> None:
        """End or pause the proof if all is known, or after enough tries; it goes on if other gradients are missing."""
        least_runs, runs = self._model.options.verify, proof.runs + 1
        if proof.is_refused:
            proof.end()
        elif (proof.is_known and runs >= least_runs) or runs >= max(TRIES, least_runs):
            self._log_unproved(proof)
            proof.rest(without)

    def _leave_unproved(self, proof: Proof, why: str) -> None:
        proof.why_unproved = why
        self._log_unproved(proof)
        proof.end()

    def _log_unproved(self, proof: Proof) -> None:
        """Log, once for a session, that code runs unproved; not for made code, which another proof may cover."""
        is_made = proof.runtime is not None and proof.runtime.captured.made_from is not None
        if proof.unproved and proof.why_unproved and not is_made:
            self._warn_once(
                "%s: %s of captured code are not proved against eager PyTorch, since %s. The plan says how much is.",
                *(self._model.name, proof.unproved, proof.why_unproved),
                topic="unproved",
            )

    def _try(
        self,
        proof: Proof,
        arguments: Sequence[Any],
        memory: ProofMemory | None,
        without: frozenset[int] | None,
        needs_numbers: bool = False,
    ) -> None:
        """Run the code eager, then as captured, and compare; with `needs_numbers`, NaN proves nothing."""
        assert proof.written is not None, "code is tried while it is proved"
        written = captured_code.without_checkpoints(proof.written)
        run_eager = partial(_run_written, proof, written, memory)
        try:
            trial, expected = run_eager(_trial_of(proof, written, arguments, memory, without))
        except Exception as error:  # whatever the user's code may raise: it will raise it when it runs
            proof.why_unproved = f"it fails as it was written: {error}"
            return
        if needs_numbers and expected.has_nan:
            return
        try:
            outcome = trial.run(proof.captured)
        except (HiRemateError, torch.OutOfMemoryError):
            raise
        except OSError as error:
            proof.why_unproved = f"there is no room to keep what it gives: {error}"
            return
        except Exception as error:  # an error inside of PyTorch: the code runs eager from now on, with a warning
            self._refuse(proof, f"torch.compile's capture of it fails when it runs: {type(error).__name__}: {error}")
            return
        compare = partial(
            differences, expected, outcome, self._half_of(proof.runtime), device=_device_of(proof, arguments)
        )
        of_values, of_gradients = compare()
        if of_values or of_gradients:  # two eager runs may differ too
            repeated = replace(trial, with_gradients=memory is not None and memory.has_eager)
            _, again = run_eager(repeated)
            of_values, of_gradients = compare(again=again)
            if expected.has_fills and not all(difference.is_rounding for difference in (*of_values, *of_gradients)):
                _, refilled = run_eager(replace(repeated, fill=0))
                of_values, of_gradients = compare(again=again, refilled=refilled)
        self._judge(proof, of_values, of_gradients, trial.with_gradients)

    def _judge(
        self, proof: Proof, of_values: list[Difference], of_gradients: list[Difference], with_gradients: bool
    ) -> None:
        wrong = [difference for difference in (*of_values, *of_gradients) if not difference.is_rounding]
        if wrong:
            self._refuse(proof, f"as captured it gives other numbers: {wrong[0].words}")
            return
        proof.rounded = tuple(difference.words for difference in (*of_values, *of_gradients))
        for words in proof.rounded:
            log.info("Captured code of %s differs by rounding: %s", self._model.name, words)
        proof.forward = Verdict.ROUNDED if of_values else Verdict.PROVED
        if with_gradients:
            proof.backward = Verdict.ROUNDED if of_gradients else Verdict.PROVED
            proof.tried_without |= set() if proof.runtime is None else proof.runtime.tried_without

    def _half_of(self, runtime: GraphRuntime | None) -> torch.dtype | None:
        """Return the type of half precision to which fused kernels don't round, as eager does; None for no type."""
        if runtime is None or self._model.kernels is None:
            return None
        dtypes = {tensor.dtype for tensor in runtime.captured.graph.tensors}
        return next((half for half in tensor_state.HALF_PRECISION if str(half).removeprefix("torch.") in dtypes), None)

    def _refuse(self, proof: Proof, why: str) -> None:
        proof.refuse(self._proofs)
        if proof.runtime is not None and proof.runtime.captured.made_from is not None:
            raise WrongAtSizesError(f"Code made from traces of other sizes does not run, since {why}")
        self._model.warn(
            f"Code of {self._model.name} runs as it was written, without a plan, since {why}. Its memory and time "
            "are those of plain PyTorch. This is a fault of torch.compile or of hiremate_lightning; please report it."
        )


def _trial_of(
    proof: Proof,
    written: fx.GraphModule,
    arguments: Sequence[Any],
    memory: ProofMemory | None,
    without: frozenset[int] | None,
) -> Trial:
    """Return the trial of code on arguments, with gradients if there is memory for an eager backward."""
    positions = None
    if proof.runtime is not None:  # the same outputs get no gradients as in a backward that has run
        without = without if without is not None else next(iter(frozenset(proof.runtime.ran_without)), None)
        positions = None if without is None else unused_at(proof.runtime.captured, without)
    # An input of captured code is called "L_self_modules_layer_buffers_count_": its name is layer.count.
    targets = [str(node.target) for node in written.graph.find_nodes(op="placeholder")]
    return Trial(
        arguments,
        names=[_NOT_PARTS.sub(".", target.removeprefix("L_").removeprefix("self")).strip("._") for target in targets],
        constants=[*written.parameters(), *written.buffers()],
        with_gradients=memory is not None and memory.has_eager,
        files=Files() if memory is not None and memory.needs_files else None,
        unused=likely_unused(written) if positions is None else lambda outputs: positions,
    )


def _run_written(
    proof: Proof, written: fx.GraphModule, memory: ProofMemory | None, trial: Trial
) -> tuple[Trial, TrialOutcome]:
    """Run code eager, with gradients if they fit, if need be with saved tensors offloaded; return trial and outcome."""
    if trial.with_gradients:
        return trial, trial.run(written)
    fits = memory is not None and memory.has_offloaded and proof.backward is Verdict.UNKNOWN
    if fits or captured_code.takes_gradients(written):  # code that takes gradients itself needs its saved tensors
        offloaded = replace(trial, with_gradients=proof.runtime is not None)
        try:
            stay = tensor_state.storages_among((*trial.arguments, *trial.constants))
            return offloaded, offloaded.run(written, SavedOffload(stay))
        except Exception as error:  # whatever the user's code may raise, or no room for files
            proof.why_unproved = f"it fails when it runs in little memory: {error}"
    return trial, trial.run(written, saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing))


def _device_of(proof: Proof, arguments: Sequence[Any]) -> torch.device:
    if proof.runtime is not None:
        return proof.runtime.captured.device
    devices = [a.device for a in arguments if isinstance(a, torch.Tensor)]
    return next((d for d in devices if d.type == "cuda"), torch.device("cpu"))


def _may_differ_from_itself(runtime: GraphRuntime, arguments: Sequence[Any]) -> bool:
    """Whether captured code may give other numbers in a trial than in its run.

    Custom operators may when they run again. So may code that changes an input which shares memory with another one:
    AOTAutograd finds both by their base, and inputs of a trial are not views.
    """
    dense = [a for a in arguments if tensor_state.is_dense(a)]
    is_shared = len({tensor_state.storage_id(a) for a in dense}) < len(dense)
    return has_unsteady(runtime.captured) or (bool(runtime.captured.mutated) and is_shared)

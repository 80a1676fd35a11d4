"""The state of the proof of captured code (`proving`), and the memory that the proof needs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import fx

from ..capturing.capture import Captured
from ..memory.allocator import alone, in_blocks
from ..records.costs import Profile, in_eager
from ..records.expressions import Sizes
from ..records.graph import StorageKind, bytes_of
from ..records.simulation import forward_peak_bytes, simulate, simulate_eager
from ..records.step import MergedStep
from ..running.execution import GraphRuntime
from ..running.program import Program
from ..torch_private import captured_code, tensor_state
from .trials import unused_at

NOT_AGAIN = "other gradients came than were proved, and that code has not run again since"


class Verdict(Enum):
    """The result of comparing captured code with the same code in eager PyTorch."""

    UNKNOWN = "they were not compared yet"
    PROVED = "both give the same bits"
    ROUNDED = "they differ by rounding"
    REFUSED = "they differ, or the captured code fails: it runs as it was written"


class ProofAtSizes:
    """The proofs of the programs of one schedule of made code: at which sizes they were compared."""

    def __init__(self, traced: Sequence[Sizes]) -> None:
        # The verdicts of the latest proof, see `Proof`: forward, backward, rounded, why_unproved.
        self.verdicts: tuple[Verdict, Verdict, tuple[str, ...], str] = Verdict.UNKNOWN, Verdict.UNKNOWN, (), ""
        self._traced, self._proved = traced, list[Sizes]()
        self._without = set[frozenset[int]]()  # positions of missing gradients, for each backward that was proved

    def holds_at(self, sizes: Sizes, without: Collection[frozenset[int]] = ()) -> bool:
        """Whether the programs are taken to give eager PyTorch's bits at some sizes, with some gradients missing.

        They are after a proof at sizes that were not traced, if each of these sizes lies between sizes that were traced
        or proved: beyond some size PyTorch may choose another algorithm, which these programs do not.
        """
        return bool(self._proved) and self.encloses(sizes) and self._without.issuperset(without)

    def encloses(self, sizes: Sizes) -> bool:
        """Whether each of these sizes lies between sizes that were traced or proved."""
        columns = zip(*self._traced, *self._proved, strict=True)
        return all(min(c) <= size <= max(c) for c, size in zip(columns, sizes, strict=True))

    def learn(self, proof: Proof, sizes: Sizes, without: Collection[frozenset[int]]) -> None:
        """Store that the program for some sizes gives eager PyTorch's bits, with these gradients missing."""
        self._proved.append(sizes)
        self._without.update(without)
        self.verdicts = proof.forward, proof.backward, proof.rounded, proof.why_unproved


class Proof:
    """Captured code with its proof. It runs as captured, or eager if the captured code gives other numbers.

    Args:
        written: The code as Dynamo has read it; it runs eager.
        captured: Runs the captured code.
        runtime: Runs the joint graph inside of `captured`; None if the code has no gradients.
        smaller: Returns, for arguments, the code made for smaller sizes, and a slice of each argument; or None.
        prove: Called before each run, as long as something is to be proved.
    """

    def __init__(
        self,
        written: fx.GraphModule,
        captured: Callable[..., Any],
        runtime: GraphRuntime | None,
        smaller: Callable[[Sequence[Any]], tuple[Proof, Sequence[Any]] | None] | None = None,
        *,
        prove: Callable[[Proof, Sequence[Any]], None],
    ) -> None:
        self.written: fx.GraphModule | None = written
        self.captured, self.runtime, self.smaller = captured, runtime, smaller
        self.forward = Verdict.UNKNOWN  # verdict on outputs, changed inputs and random generators
        self.backward = Verdict.PROVED if runtime is None else Verdict.UNKNOWN  # verdict on gradients
        self.runs = 0  # number of runs while something was to be proved
        self.rests = False  # whether the proof waits for a backward with other missing gradients
        self.at_sizes: ProofAtSizes | None = None  # proofs of the program that made code ran by last; None if traced
        # Positions of missing gradients, for each backward that was proved, or that could not be.
        self.tried_without: set[frozenset[int]] = set()
        self.rounded: tuple[str, ...] = ()  # values that differ by rounding, in words
        self.why_unproved = ""  # why the latest proof left something open, in words
        self._run, self._prove = captured, prove

    def __call__(self, *arguments: Any) -> Any:
        """Run the code, after its proof if something is to be proved."""
        is_open = self.written is not None and not (self.rests and self.next_without() is None)
        if is_open and not any(map(tensor_state.is_fake, arguments)):  # DDPOptimizer runs it on fake tensors
            self._prove(self, arguments)
            self.runs += 1
        return self._run(*arguments)

    @property
    def gradients(self) -> Verdict:
        """The verdict on the gradients of all backwards that have run."""
        if self.at_sizes is not None and self.runtime is not None:
            is_known = self.at_sizes.holds_at(self.runtime.captured.sizes, self.runtime.ran_without)
        else:
            is_known = self.written is None or self.next_without() is None
        return self.backward if is_known else Verdict.UNKNOWN

    @property
    def is_refused(self) -> bool:
        """Whether it gave other numbers than eager PyTorch."""
        return Verdict.REFUSED in (self.forward, self.backward)

    @property
    def is_known(self) -> bool:
        """Whether there are verdicts on outputs and on gradients."""
        return Verdict.UNKNOWN not in (self.forward, self.backward)

    @property
    def unproved(self) -> str:
        """The unproved part of code that runs as captured: "outputs", which include all else, "gradients", or ""."""
        return "outputs" if self.forward is Verdict.UNKNOWN else "gradients" * (self.gradients is Verdict.UNKNOWN)

    def refuse(self, proofs: Proofs) -> None:
        """Run the code eager from now on, and count these runs in `proofs`."""
        written = self.written
        assert written is not None, "code is refused while it is proved"
        run_written = captured_code.eager_module(written)

        def run(*arguments: Any) -> Any:
            proofs.runs_eager += 1
            return run_written(*arguments)

        self._run, self.forward, self.backward = run, Verdict.REFUSED, Verdict.REFUSED

    def next_without(self) -> frozenset[int] | None:
        """Return the missing gradients to prove next: of outputs alone; None if there are none."""
        if self.runtime is None or self.runtime.ran_without <= self.tried_without:
            return None
        captured, untried = self.runtime.captured, self.runtime.ran_without - self.tried_without
        return min((w for w in untried if unused_at(captured, w) is not None), key=sorted, default=None)

    def begin(self) -> None:
        """Begin a proof; if it rested, prove gradients again. Backwards that can't be proved count as tried."""
        if self.runtime is not None:
            captured = self.runtime.captured
            self.tried_without |= {w for w in self.runtime.ran_without if unused_at(captured, w) is None}
        if self.rests:
            self.rests, self.runs, self.backward = False, 0, Verdict.UNKNOWN

    def rest(self, without: frozenset[int] | None) -> None:
        """Stop proving until a backward has other missing gradients than the one that was tried, if one ran."""
        self.rests = True
        self.tried_without |= set() if without is None else {without}
        if self.runtime is None or len(self.runtime.captured.tangents) < 2:
            self.end()

    def end(self) -> None:
        """End the proof, and release the eager code."""
        self.written = None


class Proofs:
    """The proofs of one session."""

    def __init__(self) -> None:
        self._proofs: weakref.WeakSet[Proof] = weakref.WeakSet()
        self._ran_without: weakref.WeakKeyDictionary[fx.GraphModule, set[frozenset[int]]] = weakref.WeakKeyDictionary()
        self.runs_eager = 0  # number of runs of code that runs eager, since its proof failed

    def add(self, proof: Proof) -> None:
        """Add a proof; all sizes of the same code share the record of missing gradients."""
        self._proofs.add(proof)
        if proof.runtime is not None and proof.written is not None:
            proof.runtime.ran_without = self._ran_without.setdefault(proof.written, proof.runtime.ran_without)

    def words(self) -> str:
        """Return in words how much is proved so far, "" if there was nothing to prove."""
        proofs = list(self._proofs)
        trained = [proof for proof in proofs if proof.runtime is not None]
        if not proofs:
            return ""
        counts = [_count([p.forward for p in proofs], "forward", " graph" + "s" * (len(proofs) > 1))]
        counts += [_count([p.gradients for p in trained], "gradients")] if trained else []
        reasons = sorted({p.why_unproved or NOT_AGAIN for p in proofs if p.unproved})
        return ", ".join(counts) + (f"; not more, since {'; '.join(reasons)}" if reasons else "")

    def rounded(self) -> tuple[str, ...]:
        """Return, in words, the values that differ from eager PyTorch's by rounding."""
        return tuple(sorted({words for proof in self._proofs for words in proof.rounded}))


def _count(verdicts: Sequence[Verdict], name: str, unit: str = "") -> str:
    """Write how many of the verdicts are good: "forward 3 of 3 graphs (1 up to rounding)"."""
    rounded, proved = verdicts.count(Verdict.ROUNDED), verdicts.count(Verdict.PROVED)
    remark = f" ({rounded} up to rounding)" if rounded else ""
    return f"{name} {proved + rounded} of {len(verdicts)}{unit}{remark}"


# ---------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True)
class ProofMemory:
    """Bytes that the runs of a proof take beside the memory that exists before the step."""

    eager_bytes: int  # peak of an eager forward and backward
    beside_bytes: int  # peak of an eager backward without saved tensors: gradients on their way, and workspace
    saved_bytes: int  # most saved tensors that one operation of an eager backward reads, all others offloaded
    forward_bytes: int  # peak of an eager forward without gradients
    own_bytes: int  # peak of the captured forward and backward
    own_forward_bytes: int  # peak of the captured forward
    changed_bytes: int  # copies of inputs that the code changes in place
    kept_bytes: int  # results of one run, which wait for those of another; 0 on a GPU: results are on the host
    free_bytes: int  # free bytes for all of these

    @property
    def needs_files(self) -> bool:
        """Whether the results of a run are kept in files, since an eager backward does not fit beside them."""
        needed_bytes = max(self.eager_bytes, self.own_bytes + self.changed_bytes + self.kept_bytes)
        return self.kept_bytes > 0 and needed_bytes > self.free_bytes

    @property
    def has_eager(self) -> bool:
        """Whether an eager backward fits."""
        return max(self.eager_bytes, self.own_bytes + self.changed_bytes) <= self.free_bytes

    @property
    def has_forward(self) -> bool:
        """Whether an eager forward without gradients fits."""
        return max(self.forward_bytes, self.own_forward_bytes + self.changed_bytes) <= self.free_bytes

    @property
    def has_offloaded(self) -> bool:
        """Whether an eager backward fits with its saved tensors offloaded."""
        beside_bytes = max(self.beside_bytes + self.changed_bytes, self.forward_bytes)
        needed_bytes = max(self.saved_bytes + beside_bytes, self.own_bytes + self.changed_bytes)
        return needed_bytes <= self.free_bytes


def proof_memory(
    captured: Captured, profile: Profile, program: Program, free_bytes: Callable[[MergedStep, torch.device], int]
) -> ProofMemory:
    """Predict the bytes that the runs of a proof allocate, and the bytes that are free for them."""
    graph, step = in_blocks(captured.graph, captured.device), alone(captured.graph, profile, captured.device)
    simulated = simulate(graph, profile, program.schedule)
    # Activations of 0 bytes, and gradients that are dropped as they come.
    storages = (replace(s, size_bytes=0) if s.kind is StorageKind.ACTIVATION else s for s in graph.storages)
    without_activations = replace(graph, storages=tuple(storages), gradients=())
    # Saved tensors are offloaded, except those that the running backward node reads.
    eager, _ = in_eager(graph, profile)
    saved = {i: s.size_bytes for i, s in enumerate(eager.storages) if s.kind is StorageKind.ACTIVATION}
    read = [{eager.tensors[t].storage for t in eager.nodes[index].inputs} for index in eager.backward]
    return ProofMemory(
        eager_bytes=step.eager_bytes,
        saved_bytes=max((sum(saved.get(s, 0) for s in storages if s is not None) for storages in read), default=0),
        beside_bytes=simulate_eager(without_activations, profile).peak_bytes,
        forward_bytes=forward_peak_bytes(graph, profile),
        own_bytes=simulated.peak_bytes,
        own_forward_bytes=max((moment.peak_bytes for moment in simulated.timeline[: simulated.turn]), default=0),
        changed_bytes=2 * bytes_of(graph, captured.mutated),
        kept_bytes=bytes_of(graph, (*graph.outputs, *graph.gradients)) if captured.device.type == "cpu" else 0,
        free_bytes=max(free_bytes(step, captured.device), simulated.peak_bytes),  # the step takes them in any case
    )

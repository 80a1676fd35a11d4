"""What is proved of captured code (`proving`), and how each code runs: as captured, or as the user wrote it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from torch import fx

from ..running.execution import Part
from ..torch_private import checkpoints, tensor_state


class Verdict(Enum):
    """What is known of captured code beside the same code as it was written."""

    UNKNOWN = "they were not compared yet"
    PROVED = "both give the same bits"
    ROUNDED = "they differ by rounding"
    REFUSED = "they differ, or the captured code fails: it runs as it was written"


class Proof:
    """Captured code: it runs as captured, or as the user wrote it where that gives other numbers.

    Args:
        written: The code as Dynamo has read it.
        captured: Runs it as captured.
        part: The part that runs inside of that, None where it has no gradients.
        smaller: Returns, for some arguments, code of smaller sizes to prove in its place, and some of each argument.
        prove: Called before a run, as long as there is something to prove.

    Attributes:
        forward: What is known of outputs, changed inputs and generators.
        backward: What is known of gradients.
        runs: How often it has run while there was something to prove.
        rounded: The values that differ by rounding, in words.
    """

    def __init__(
        self,
        written: fx.GraphModule,
        captured: Callable[..., Any],
        part: Part | None,
        smaller: Callable[[Sequence[Any]], tuple[Proof, Sequence[Any]] | None] | None = None,
        *,
        prove: Callable[[Proof, Sequence[Any]], None],
    ) -> None:
        self.written: fx.GraphModule | None = written
        self.captured, self.part, self.smaller = captured, part, smaller
        self.forward, self.backward = Verdict.UNKNOWN, Verdict.PROVED if part is None else Verdict.UNKNOWN
        self.runs = 0
        self.rounded: tuple[str, ...] = ()
        self._run, self._prove = captured, prove

    def __call__(self, *arguments: Any) -> Any:
        """Run the code."""
        if self.written is not None and not any(map(tensor_state.is_fake, arguments)):  # DDPOptimizer asks for shapes
            self._prove(self, arguments)
            self.runs += 1
        return self._run(*arguments)

    def refuse(self, proofs: Proofs) -> None:
        """Run the code as it was written, from now on, and count its runs."""
        written = self.written
        assert written is not None, "code is refused while it is proved"
        run_written = checkpoints.as_written(written)

        def run(*arguments: Any) -> Any:
            proofs.runs_as_written += 1
            return run_written(*arguments)

        self._run, self.forward, self.backward = run, Verdict.REFUSED, Verdict.REFUSED

    def end(self) -> None:
        """Learn that there is nothing more to prove, and let go of what that took."""
        self.written = None


class Proofs:
    """The proofs of one session.

    Attributes:
        runs_as_written: How often code has run as the user wrote it, since its proof failed.
    """

    def __init__(self) -> None:
        self._proofs: weakref.WeakSet[Proof] = weakref.WeakSet()
        self.runs_as_written = 0

    def add(self, proof: Proof) -> None:
        """Count a proof among those of the session."""
        self._proofs.add(proof)

    def words(self) -> str:
        """What is proved so far, "" where nothing was to be proved."""
        proofs = list(self._proofs)
        trained = [proof for proof in proofs if proof.part is not None]
        if not proofs:
            return ""
        counts = [_count([p.forward for p in proofs], "forward", " graph" + "s" * (len(proofs) > 1))]
        counts += [_count([p.backward for p in trained], "gradients")] if trained else []
        return ", ".join(counts)

    def rounded(self) -> tuple[str, ...]:
        """The values that differ from eager PyTorch's by rounding, in words."""
        return tuple(sorted({words for proof in self._proofs for words in proof.rounded}))


def _count(verdicts: Sequence[Verdict], name: str, unit: str = "") -> str:
    """Write how many of the verdicts are good: "forward 3 of 3 graphs (1 up to rounding)"."""
    rounded, proved = verdicts.count(Verdict.ROUNDED), verdicts.count(Verdict.PROVED)
    remark = f" ({rounded} up to rounding)" if rounded else ""
    return f"{name} {proved + rounded} of {len(verdicts)}{unit}{remark}"

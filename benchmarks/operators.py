"""Train through every operator that PyTorch lists with a derivative, plainly and planned, and compare bit for bit.

    pip install expecttest  # what PyTorch's list of operators needs
    python benchmarks/operators.py [--only NAME,NAME] [--write benchmarks/results/DATE-operators.md]

A module multiplies the operator's first input by a weight and applies it to PyTorch's own sample of it, the one of most
dimensions. The loss reads the result transposed, so that gradients come with other strides than they are traced with.
Compared are the loss, the results, and the gradients of inputs and weight. Nothing is recomputed: this is about what
is captured. Prints what is not equal, and counts.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import page_tables
import torch
from provenance import provenance
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hiremate_lightning import hiremate, remove_hiremate

STEPS = 3  # the first ones capture and plan
TIME_LIMIT_S = 60
ROUNDING = 1e-5
EXACT, ROUNDED, WRONG, FAILED, SKIPPED = (
    "exact",
    "equal but for rounding",
    "WRONG",
    "refused or failed",
    "no sample that plain PyTorch trains like this",
)


class Applied(nn.Module):
    """An operator behind a weight."""

    def __init__(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.operator, self.args, self.kwargs = operator, args, kwargs

    def forward(self, x: Any) -> Any:
        """Apply it."""
        return self.operator(self._weighted(x), *self.args, **self.kwargs)

    def _weighted(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(self._weighted(inner) for inner in x)
        return x * self.weight if x.is_floating_point() else x


def trained(value: Any) -> list[Tensor]:
    """List the tensors of a result that a loss can read."""
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.requires_grad and t.is_floating_point()]


def loss_of(results: list[Tensor]) -> Tensor:
    """Weigh all numbers, transposed, so that gradients come with other strides than results have."""
    total = torch.zeros(())
    for result in results:
        turned = result.transpose(0, -1).contiguous() if result.dim() > 1 else result
        total = total + (turned * torch.randn(turned.shape, generator=torch.Generator().manual_seed(1))).sum()
    return total


def step(module: Applied, x: Any) -> list[Tensor | None]:
    """Take one step, and give all that must be equal."""
    torch.manual_seed(7)
    module.zero_grad()
    inputs = [t for t in tree_leaves(x) if isinstance(t, Tensor)]
    for tensor in inputs:
        tensor.grad = None
    results = trained(module(x))
    loss = loss_of(results)
    loss.backward()
    gradients = [module.weight.grad, *(t.grad for t in inputs)]
    return [loss.detach(), *(r.detach() for r in results), *(None if g is None else g.clone() for g in gradients)]


def sample_of(operator: Any) -> Any | None:
    """Choose the sample input of most dimensions, None where none is made of numbers."""

    def dimensions(sample: Any) -> int:
        first = next((t for t in tree_leaves(sample.input) if isinstance(t, Tensor)), None)
        return first.dim() if first is not None and first.numel() and first.is_floating_point() else -1

    samples = [s for s in operator.sample_inputs("cpu", torch.float32, requires_grad=False) if dimensions(s) >= 0]
    chosen = max(samples, key=dimensions, default=None)
    for tensor in tree_leaves(chosen.input) if chosen is not None else ():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            tensor.requires_grad_()
    return chosen


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Stop what takes too long."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def compare(found: list[Tensor | None], expected: list[Tensor | None]) -> tuple[str, str]:
    """Say whether all is equal: one of the words of the table, and by how much it is not."""
    worst = 0.0
    for mine, theirs in zip(found, expected, strict=True):
        if (mine is None) != (theirs is None):
            return WRONG, "a gradient is there in one of them only"
        if mine is None or theirs is None or torch.equal(mine.nan_to_num(), theirs.nan_to_num()):
            continue
        largest = theirs.abs().nan_to_num().max().clamp_min(1e-12)
        worst = max(worst, float((mine - theirs).abs().nan_to_num().max() / largest))
    return (EXACT if not worst else ROUNDED if worst <= ROUNDING else WRONG), f"by {worst:.0e} of the largest number"


def check(operator: Any) -> tuple[str, str]:
    """Train through one operator plainly and planned."""
    try:
        sample = sample_of(operator)
        if sample is None:
            return SKIPPED, ""
        expected = step(Applied(operator.op, sample.args, sample.kwargs), sample.input)
    except Exception as error:  # samples are made for other tests
        return SKIPPED, f"{type(error).__name__}: {error}"
    torch._dynamo.reset()
    module = Applied(operator.op, sample.args, sample.kwargs)
    try:
        hiremate(module, "1 TiB", verbose=False)
        found = [step(module, sample.input) for _ in range(STEPS)][-1]
    except Exception as error:  # whatever it is, it is a finding
        return FAILED, " ".join(f"{type(error).__name__}: {error}".split())[:160]
    finally:
        remove_hiremate(module)
    return compare(found, expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of operators")
    parser.add_argument("--write", type=Path, default=None, help="file for the page")
    options = parser.parse_args()
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    torch._logging.set_logs(dynamo=logging.CRITICAL)
    only, start = set(filter(None, options.only.split(","))), time.perf_counter()
    counts: Counter[str] = Counter()
    findings = []
    for operator in op_db:
        name = f"{operator.name}.{operator.variant_test_name}".rstrip(".")
        if not (operator.supports_autograd and operator.supports_dtype(torch.float32, "cpu")) or (
            only and name not in only
        ):
            continue
        try:
            with limited(TIME_LIMIT_S):
                result, details = check(operator)
        except TimeoutError as error:
            result, details = FAILED, str(error)
        counts[result] += 1
        if result not in (EXACT, SKIPPED):
            findings.append((f"`{name}`", result, details))
            sys.stderr.write(page_tables.row(*findings[-1]))
    text = [
        f"# Operators, {datetime.datetime.now(tz=datetime.timezone.utc):%Y-%m-%d}\n",
        f"`python benchmarks/operators.py`; {provenance()}; "
        f"{torch.get_num_threads()} thread(s), {time.perf_counter() - start:.0f} s. What is compared is said there.\n",
        page_tables.table(("result", "operators"), [(r, counts[r]) for r in (EXACT, ROUNDED, WRONG, FAILED, SKIPPED)]),
        page_tables.table(("operator", "result", ""), findings),
    ]
    page = "\n".join(text)
    sys.stdout.write(page)
    if options.write is not None:
        options.write.write_text(page)


if __name__ == "__main__":
    main()

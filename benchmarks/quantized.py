"""Train small models on quantized layers of bitsandbytes and torchao plain and planned, and compare bit for bit.

    python benchmarks/quantized.py [--only bitsandbytes_4bit,torchao_int8] [--budget 60%]

Each model is a chain of blocks with a frozen quantized layer and a trained adapter around it, or, for training that is
aware of quantization (QAT), a trained layer. It takes five steps of AdamW. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable

import page_tables
import torch
from provenance import provenance
from torch import Tensor, nn

from hiremate_lightning import HiRemateWarning, get_plan, hiremate

WIDTH, ROWS, BLOCKS, STEPS = 64, 512, 4, 5


class Adapted(nn.Module):
    """A frozen layer with a trained adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both, activated."""
        return x + nn.functional.gelu(self.base(x) + self.up(self.down(x)))


def bitsandbytes_4bit() -> nn.Module:
    """Adapters around layers in four bits, as QLoRA has them."""
    import bitsandbytes as bnb

    return _replaced(lambda: bnb.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4"))


def bitsandbytes_8bit() -> nn.Module:
    """Adapters around layers in eight bits."""
    import bitsandbytes as bnb

    return _replaced(lambda: bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False))


def torchao_int8() -> nn.Module:
    """Adapters around layers whose weights torchao keeps in eight bits."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = _adapted()
    for block in model:
        quantize_(block.base, Int8WeightOnlyConfig(), filter_fn=lambda module, _: isinstance(module, nn.Linear))
        block.base.requires_grad_(False)
    return model


def torchao_qat() -> nn.Module:
    """Layers that torchao trains aware of quantization: eight bits for activations, four for weights."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.qat import QATConfig

    base = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)))
    quantize_(model, QATConfig(base, step="prepare"))
    return model


CASES = {build.__name__: build for build in (bitsandbytes_4bit, bitsandbytes_8bit, torchao_int8, torchao_qat)}


def _adapted() -> nn.Sequential:
    return nn.Sequential(*(Adapted() for _ in range(BLOCKS)))


def _replaced(make: Callable[[], nn.Module]) -> nn.Module:
    """Put quantized layers in the place of the frozen ones; their weights are quantized as they come to the device."""
    model = _adapted()
    for block in model:
        weights = block.base.state_dict()
        block.base = make()
        block.base.load_state_dict(weights)
        block.base.requires_grad_(False)
    return model.to("cpu")


def train(model: nn.Module) -> list[Tensor]:
    """Train; return each loss and gradient, and the parameters at the end."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(ROWS, WIDTH, generator=generator)).square().mean()
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in trained)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in trained)]


def show(name: str, budget: str) -> str:
    """Train a model plain and planned, and write a row of the table."""
    torch.manual_seed(0)
    plain = CASES[name]()
    planned = hiremate(copy.deepcopy(plain), budget, verbose=False, on_infeasible="warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pairs = list(zip(train(plain), train(planned), strict=True))
    is_exact = all(torch.equal(one, other) for one, other in pairs)
    plan = get_plan(planned)
    cells = [name, "yes" if is_exact else "**no**", budget]
    if plan is None:
        return page_tables.row(*cells, "-", "-", "no plan")
    measured, kept = plan.measured.peak_bytes, "within" if plan.planned_peak_bytes <= plan.budget_bytes else "above"
    is_within = measured is None or measured <= plan.budget_bytes
    said = sorted({str(w.message).partition(": ")[0] for w in caught if issubclass(w.category, HiRemateWarning)})
    cells += [f"{kept}, measured {'within' if is_within else 'ABOVE'}", plan.proved, " ".join(said) or "-"]
    return page_tables.row(*cells)


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--budget", default="60%")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write(f"{provenance('bitsandbytes', 'torchao')}\n\n")
    sys.stdout.write(page_tables.head("model", "exact", "budget", "planned", "proved", "said"))
    for name in options.only.split(","):
        sys.stdout.write(show(name, options.budget))
        sys.stdout.flush()
        torch.compiler.reset()


if __name__ == "__main__":
    main()

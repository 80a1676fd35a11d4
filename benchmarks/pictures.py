"""Draw the pictures of the documents from real plans: train a few steps within a budget, and write what the plan says.

    python benchmarks/pictures.py [--models gpt,unet] [--budget 50%] [--to docs/pictures] [--html]

Writes MODEL.svg, the memory of a step over time, and MODEL.txt, the table that a terminal shows; with --html the whole
report as well, several megabytes. Times are of this machine; threads are set to 1.
"""

from __future__ import annotations

import argparse
import io
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from zoo.models import MODELS

from hiremate_lightning import Plan, get_plan, hiremate, write_html, write_svg
from hiremate_lightning.reporting.terminal import plan_table

STEPS = 6  # capture, plan, peak, time, and two more in which nothing is measured


def train(name: str, budget: str) -> Plan:
    """Train a model until its plan is measured."""
    torch.manual_seed(0)
    module, batch = MODELS[name]()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    hiremate(module, budget, optimizer=optimizer, verbose=False)
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = module(*batch)
        loss = output if output.ndim == 0 else output.float().square().mean()
        loss.backward()
        optimizer.step()
    plan = get_plan(module)
    assert plan is not None
    return replace(plan, target=name)  # not the wrapper that adds the loss


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt,unet", help=f"of {', '.join(MODELS)} (default: %(default)s)")
    parser.add_argument("--budget", default="50%", help="as everywhere (default: %(default)s)")
    parser.add_argument("--to", type=Path, default=Path("docs/pictures"), help="folder (default: %(default)s)")
    parser.add_argument("--html", action="store_true", help="write the HTML report as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.to.mkdir(parents=True, exist_ok=True)
    for name in arguments.models.split(","):
        plan = train(name, arguments.budget)
        table = Console(file=io.StringIO(), width=100, record=True)
        table.print(plan_table(plan))
        lines = [line.rstrip() for line in table.export_text().splitlines()]
        (arguments.to / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(write_svg(plan, arguments.to / f"{name}.svg"), plan.summary(), sep="\n")
        if arguments.html:
            print(write_html(plan, arguments.to / f"{name}.html"))


if __name__ == "__main__":
    main()

"""Train a transformers model on the source of Python's standard library with Accelerate, inside a budget.

pip install transformers
accelerate launch examples/accelerate_lm.py --budget 60%
ACCELERATE_USE_CPU=true HIREMATE_BUDGET=60% torchrun --nproc_per_node 2 examples/accelerate_lm.py
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ModuleNotFoundError:
    sys.exit(f"The model comes with transformers. Install it first: {sys.executable} -m pip install transformers")
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from hiremate_lightning import get_plan
from hiremate_lightning.integrations.accelerate import prepare_hiremate


def windows(length: int) -> torch.Tensor:
    """Cut the library's source into windows of bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, length, length).long()


def main() -> None:
    """Train a few steps and say what the plan did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", help="bytes, or a share of what a step adds (default: HIREMATE_BUDGET, or auto)")
    parser.add_argument("--precision", default="no", choices=("no", "bf16", "fp16"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()

    accelerator = Accelerator(mixed_precision=args.precision)
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=128, n_embd=128, n_layer=args.layers, n_head=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(windows(128), batch_size=args.batch, shuffle=True)

    # Instead of accelerator.prepare; all else stays as it is.
    model, optimizer, loader = prepare_hiremate(accelerator, model, optimizer, loader, budget=args.budget)

    for step, tokens in zip(range(args.steps), loader, strict=False):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}  loss {loss.item():.4f}")

    accelerator.print(get_plan(accelerator.unwrap_model(model)).summary())


if __name__ == "__main__":
    main()

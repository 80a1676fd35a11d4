"""Measure training with dynamic padding: a BERT whose batches come with masks, in a length of their own each.

    python benchmarks/padding.py [--layers 6] [--width 256] [--steps 40] [--epochs 2] [--budget 60%] [--max-plans 8]

Where masks are given, transformers' models are captured as several graphs, since the way attention is computed depends
on the mask's values. Each batch is padded to the longest of its sequences. Prints a Markdown table: seconds of each
epoch, plain and planned, and how many plans were made.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings

import torch
from provenance import provenance
from torch import Tensor, nn

from hiremate_lightning import HiRemateWarning, hiremate
from hiremate_lightning.sessions.targets import targets_of

ROWS, SHORTEST, LONGEST, WORDS = 8, 32, 160, 1000


def padded(seed: int) -> dict[str, Tensor]:
    """Draw a batch of sequences, padded to the longest."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(SHORTEST, LONGEST, (ROWS,), generator=generator)
    length = int(lengths.max())
    mask = (torch.arange(length) < lengths[:, None]).long()
    words = torch.randint(5, WORDS, (ROWS, length), generator=generator) * mask
    return {"input_ids": words, "attention_mask": mask, "labels": lengths % 2}


def build(layers: int, width: int) -> nn.Module:
    """Build the model, from the same seed each time."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        intermediate_size=4 * width,
        vocab_size=WORDS,
        max_position_embeddings=LONGEST,
    )
    return BertForSequenceClassification(config)


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Train for an epoch; give its seconds."""
    start = time.perf_counter()
    for seed in range(steps):
        optimizer.zero_grad()
        model(**padded(seed)).loss.backward()
        optimizer.step()
    return time.perf_counter() - start


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--max-plans", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", HiRemateWarning)
    models = [build(options.layers, options.width) for _ in range(2)]
    planned = hiremate(models[1], options.budget, max_plans=options.max_plans, verbose=False)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in models]
    lengths = {padded(seed)["input_ids"].shape[1] for seed in range(options.steps)}
    sys.stdout.write(f"{provenance('transformers')}; 1 thread\n")
    sys.stdout.write(
        f"{options.steps} steps an epoch, {len(lengths)} lengths from {min(lengths)} to {max(lengths)}\n\n"
    )
    sys.stdout.write("| epoch | plain s | planned s | plans | same weights |\n|--|--|--|--|--|\n")
    for number in range(options.epochs):
        seconds = []
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(number)
            seconds.append(epoch(model, optimizer, options.steps))
        plans = len(targets_of(planned).session.plans)
        pairs = zip(models[0].parameters(), planned.parameters(), strict=True)
        is_same = all(torch.equal(one, other) for one, other in pairs)
        sys.stdout.write(f"| {number + 1} | {seconds[0]:.1f} | {seconds[1]:.1f} | {plans} | {is_same} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

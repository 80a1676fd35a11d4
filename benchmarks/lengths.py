"""Measure training in which nearly every batch has a length of its own, as in fine-tuning.

    python benchmarks/lengths.py [--models gpt2_6,bert_6,unet,graph] [--methods eager,checkpoint,planned] [--steps 100]

Lengths are drawn from a log-normal distribution (median 80, cut at 16 and 256). Batches of 4 are padded to their
longest sequence, with masks; T5 gets texts of one length and labels of another; lora_6 is llama_6 with frozen weights
and adapters; AdamW. A UNet gets pictures and a graph network gets graphs of random sizes; an encoder gets three columns
of texts, each padded to its own length, also from inside of a backward (columns, gradcache); Qwen2-VL gets texts with
pictures of any size (`zoo/sizes_that_vary.py`).
The budget is what exists before a step and a share (--share) of what the longest batch adds in eager PyTorch, so that
long batches need recomputation. Each method runs in a process of its own.

Prints a Markdown table: seconds of all steps, the first ones included; the same over eager's; the number of steps in
which something was captured; the largest resident memory of the process; and whether every loss is eager's, bit for
bit. With --peaks each step is measured, not timed, and the table shows the largest peak over the budget.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import page_tables
import torch
from provenance import provenance
from torch import Tensor, nn
from zoo import sizes_that_vary

from hiremate_lightning import bucket_lengths, bucket_of, hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.targets.modules import targets_of

RANK = 8  # of adapters
ROWS, MEDIAN, SHORTEST, LONGEST, WORDS = 4, 80, 16, 256, 1000
METHODS = ("eager", "checkpoint", "compile", "buckets", "planned")
Batch = dict[str, Tensor]


def lengths_of(step: int) -> Tensor:
    """Draw the lengths of the sequences of a batch."""
    noise = torch.randn(ROWS, generator=torch.Generator().manual_seed(step))
    return (MEDIAN * torch.exp(0.5 * noise)).long().clamp(SHORTEST, LONGEST)


def batch_of(step: int, pad_to: Callable[[int], int] = int, has_labels_apart: bool = False) -> Batch:
    """Make the batch of a step, padded to its longest sequence or beyond; its labels may have a length of their own."""
    lengths = lengths_of(step)
    batch = _batch(lengths, pad_to(int(lengths.max())), step)
    if has_labels_apart:
        lengths = lengths_of(step + 1_000_000)
        batch["labels"] = _batch(lengths, pad_to(int(lengths.max())), step)["labels"]
    return batch


def _batch(lengths: Tensor, length: int, seed: int) -> Batch:
    mask = (torch.arange(length) < lengths[:, None]).long()
    words = torch.randint(5, WORDS, (len(lengths), length), generator=torch.Generator().manual_seed(seed)) * mask
    return {"input_ids": words, "attention_mask": mask, "labels": torch.where(mask == 1, words, -100)}


class _Adapted(nn.Module):
    """A linear layer and what an adapter adds to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


def _adapt(llama: nn.Module) -> None:
    """Freeze a Llama, and give adapters to its queries and values."""
    llama.requires_grad_(False)
    for layer in llama.model.layers:
        for projection in ("q_proj", "v_proj"):
            setattr(layer.self_attn, projection, _Adapted(getattr(layer.self_attn, projection)))


def build(name: str) -> nn.Module:
    """Build a model by its name (of transformers: kind and number of layers), the same weights each time."""
    if name in sizes_that_vary.MODELS:
        torch.manual_seed(0)
        return sizes_that_vary.MODELS[name]().train()
    import transformers

    kind, _, layers = name.rpartition("_")
    sizes = {"hidden_size": 256, "num_hidden_layers": int(layers), "num_attention_heads": 8, "vocab_size": WORDS}
    torch.manual_seed(0)
    if kind == "gpt2":
        gpt2 = {"n_embd": 256, "n_layer": int(layers), "n_head": 8, "n_positions": LONGEST, "vocab_size": WORDS}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2, use_cache=False))
    elif kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=1024))
    elif kind in ("llama", "lora"):
        config = transformers.LlamaConfig(**sizes, intermediate_size=688, num_key_value_heads=4, use_cache=False)
        model = transformers.LlamaForCausalLM(config)
        if kind == "lora":
            _adapt(model)
    elif kind == "t5":
        sizes = {
            "d_model": 256,
            "d_kv": 32,
            "d_ff": 1024,
            "num_heads": 8,
            "vocab_size": WORDS,
            "num_layers": int(layers),
        }
        config = transformers.T5Config(**sizes, decoder_start_token_id=0, use_cache=False)
        model = transformers.T5ForConditionalGeneration(config)
    else:
        raise SystemExit(
            f"Unknown model {name!r}: expected one of {', '.join(sizes_that_vary.MODELS)}, or gpt2_N, bert_N, llama_N, "
            "lora_N, t5_N, where N counts layers."
        )
    return model.train()


def budget_of(name: str, share: float) -> int:
    """Return the bytes that exist before a step, and a share of what the longest batch adds in eager PyTorch."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters())
    longest = _batch(torch.full((ROWS,), LONGEST), LONGEST, 0)
    if name in sizes_that_vary.MODELS:
        longest = sizes_that_vary.batch_of(name, None)

    def train() -> None:
        model(**longest).loss.backward()

    train()
    optimizer.step()
    optimizer.zero_grad()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    resident = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *state, *longest.values()))
    return resident + int(share * measure_peak(train))


def train(name: str, method: str, steps: int, budget_bytes: int, peaks: bool) -> dict[str, Any]:
    """Train with one method and return what was measured."""
    torch.set_num_threads(1)
    model, pad_to = build(name), int
    if method == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif method == "compile":
        torch._functorch.config.activation_memory_budget = 0.5
        model.compile(dynamic=True)
    elif method == "buckets":
        buckets = bucket_lengths([int(lengths_of(step).max()) for step in range(steps)])
        pad_to = lambda length: bucket_of(length, buckets)  # noqa: E731
    if method in ("planned", "buckets"):
        hiremate(sizes_that_vary.planned_part(model), budget_bytes, verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds, added, captured = [], 0.0, 0, 0
    torch.manual_seed(1)
    for step in range(steps):
        others = name in sizes_that_vary.MODELS
        batch = sizes_that_vary.batch_of(name, step) if others else batch_of(step, pad_to, name.startswith("t5"))
        before = captured_count(model)

        def act(batch: Batch = batch) -> None:
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.detach())

        start = time.perf_counter()
        if peaks:
            added = max(added, measure_peak(act) + sum(t.nbytes for t in batch.values()))
        else:
            act()
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - start
        captured += captured_count(model) > before
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    resident = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *state))
    return {
        "seconds": seconds,
        "captured": captured,
        "peak_over_budget": (resident + added) / budget_bytes if peaks else None,
        "host_gib": _host_gib(),
        "losses": hashlib.sha256(torch.stack(losses).numpy().tobytes()).hexdigest(),
    }


def _host_gib() -> float:
    """Return the largest resident memory of this process; that of `resource` begins with its parent's on Linux."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**20


def captured_count(model: nn.Module) -> int:
    targets = targets_of(sizes_that_vary.planned_part(model))
    return 0 if targets is None else targets.session.captured_count


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2_6,bert_6,llama_6")
    parser.add_argument("--methods", default="eager,checkpoint,planned", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--share", type=float, default=0.7)
    parser.add_argument("--peaks", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # method and budget, in a process of its own
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.one:
        method, budget = options.one
        print(json.dumps(train(options.models, method, options.steps, int(budget), options.peaks)))
        return
    new = len({int(lengths_of(step).max()) for step in range(options.steps)})
    sys.stdout.write(f"{provenance('transformers')}; 1 thread; {options.steps} steps, {new} lengths\n\n")
    columns = "seconds", "over eager", "steps with a capture", "peak over budget", "host", "losses"
    sys.stdout.write(page_tables.head("model", "method", *columns))
    for name in options.models.split(","):
        budget, eager = budget_of(name, options.share), None
        for method in options.methods.split(","):
            found = _apart(name, method, budget, options)
            eager = found if method == "eager" else eager
            over = f"{found['seconds'] / eager['seconds']:.2f}" if eager else "-"
            same = "-" if eager is None else "equal" if found["losses"] == eager["losses"] else "differ"
            peak = f"{found['peak_over_budget']:.3f}" if options.peaks else "-"
            seconds, host = f"{found['seconds']:.1f}", f"{found['host_gib']:.2f} GiB"
            sys.stdout.write(page_tables.row(name, method, seconds, over, found["captured"], peak, host, same))
            sys.stdout.flush()


def _apart(name: str, method: str, budget_bytes: int, options: argparse.Namespace) -> dict[str, Any]:
    command = [
        sys.executable,
        __file__,
        "--models",
        name,
        "--steps",
        str(options.steps),
        "--one",
        method,
        str(budget_bytes),
    ]
    done = subprocess.run(command + ["--peaks"] * options.peaks, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()

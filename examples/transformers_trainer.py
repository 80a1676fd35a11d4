"""Train a transformers model on the source of Python's standard library with transformers' Trainer, inside a budget.

pip install transformers
python examples/transformers_trainer.py --budget 60%
torchrun --nproc_per_node 2 examples/transformers_trainer.py --budget 60% --bf16
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

try:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
except ModuleNotFoundError:
    sys.exit(f"The model comes with transformers. Install it first: {sys.executable} -m pip install transformers")
import torch
from torch.utils.data import Dataset

from hiremate_lightning.integrations.transformers_trainer import HiRemateTrainerCallback


class Windows(Dataset[dict[str, torch.Tensor]]):
    """The library's source in windows of bytes."""

    def __init__(self, length: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"\n".join(path.read_bytes() for path in files)
        self._rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, length, length).long()

    def __len__(self) -> int:
        """Count the windows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Give one window, to be predicted from itself."""
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def main() -> None:
    """Train a few steps; the plan, and then what was measured of it, are reported meanwhile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="auto", help="bytes, or a share of what a step adds (default: auto)")
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()

    set_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=128, n_embd=128, n_layer=args.layers, n_head=4, use_cache=False)
    model = GPT2LMHeadModel(config)

    with TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=1e-3,
            logging_steps=1,
            bf16=args.bf16,
            use_cpu=args.cpu,
            report_to="none",
            disable_tqdm=True,
        )
        planning = HiRemateTrainerCallback(args.budget)  # the one thing to add; all else stays as it is
        Trainer(model=model, args=settings, train_dataset=Windows(128), callbacks=[planning]).train()


if __name__ == "__main__":
    main()

"""Train a byte-level GPT on the source of Python's standard library, in half of the memory.

The same seed is trained twice, plain and with `HiRemateCallback`, and both are compared bit for bit:

    python examples/gpt.py
    python examples/gpt.py --budget 35% --steps 20
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

print("Loading PyTorch and Lightning: 5 to 20 seconds, the first time after an installation up to a minute", flush=True)

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from proof import train_twice


class Block(nn.Module):
    """Attention over what came before, then two dense layers; each on a normalised residual stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.mix(self.attend(self.norm_1(x))))
        return x + self.dropout(self.dense(self.norm_2(x)))

    def attend(self, x: Tensor) -> Tensor:
        """Let each position look at itself and those before it."""
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class GPT(L.LightningModule):
    """Predict the next byte."""

    def __init__(
        self, blocks: int = 10, width: int = 256, heads: int = 8, context: int = 256, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.bytes(tokens) + self.places(places))
        return self.head(self.norm(self.blocks(x)))

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        logits = self(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class StandardLibrary(Dataset[Tensor]):
    """The modules at the top of Python's standard library, cut into windows of bytes."""

    def __init__(self, window: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"\n".join(path.read_bytes() for path in files)
        self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, window, window)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index].long()


def main() -> bool:
    """Read the sizes from the command line and train twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="50%", help="bytes, or a share of what a step adds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="steps of each run (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--losses", action="store_true", help="show the loss of each step of both runs, bit by bit")
    sizes = parser.parse_args()
    text = StandardLibrary(sizes.context + 1)
    return train_twice(
        make_model=lambda: GPT(sizes.blocks, sizes.width, context=sizes.context),
        make_data=lambda: DataLoader(text, sizes.batch, shuffle=True),
        steps=sizes.steps,
        budget=sizes.budget,
        show_losses=sizes.losses,
    )


if __name__ == "__main__":
    sys.exit(not main())

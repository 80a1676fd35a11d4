"""Train a UNet with batch norm to take the noise out of photographs, in half of the memory.

The photographs come with scikit-image. The same seed is trained twice, plain and with `HiRemateCallback`, and both are
compared bit for bit:

    pip install scikit-image
    python examples/unet.py
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise

try:
    from skimage import data
except ModuleNotFoundError:
    sys.exit(f"The photographs come with scikit-image. Install it first: {sys.executable} -m pip install scikit-image")

print("Loading PyTorch and Lightning: 5 to 20 seconds, the first time after an installation up to a minute", flush=True)

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from proof import IN_TURN, PAIRS, train_twice


def convolve(channels_in: int, channels_out: int) -> nn.Sequential:
    """Three convolutions, each with batch norm and ReLU."""
    layers: list[nn.Module] = []
    for channels in (channels_in, channels_out, channels_out):
        layers += [
            nn.Conv2d(channels, channels_out, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class UNet(L.LightningModule):
    """Predict the noise of a picture, to be taken off it."""

    def __init__(self, width: int = 24, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        pairs = list(pairwise(widths))  # (fine, coarse) for each level
        self.first = convolve(3, width)
        self.down = nn.ModuleList(convolve(fine, coarse) for fine, coarse in pairs)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(coarse, fine, 2, stride=2) for fine, coarse in pairs)
        self.up = nn.ModuleList(convolve(2 * fine, fine) for fine, _ in pairs)
        self.last = nn.Conv2d(width, 3, kernel_size=1)

    def forward(self, noisy: Tensor) -> Tensor:
        levels = [self.first(noisy)]
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for grow, up in zip(reversed(self.grow), reversed(self.up), strict=True):
            x = up(torch.cat([levels.pop(), grow(x)], dim=1))
        return noisy - self.last(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        noisy, clean = batch
        loss = F.mse_loss(self(noisy), clean)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class NoisyPhotographs(Dataset[tuple[Tensor, Tensor]]):
    """Crops of photographs at random places, with random noise and without."""

    def __init__(self, crops: int, side: int, noise: float = 0.1) -> None:
        pictures = [data.astronaut(), data.chelsea(), data.coffee(), data.rocket(), *data.stereo_motorcycle()[:2]]
        self.pictures = [torch.from_numpy(picture.copy()).permute(2, 0, 1) / 255 for picture in pictures]
        self.crops, self.side, self.noise = crops, side, noise

    def __len__(self) -> int:
        return self.crops

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture = self.pictures[index % len(self.pictures)]
        top, left = (int(torch.randint(size - self.side + 1, ())) for size in picture.shape[1:])
        clean = picture[:, top : top + self.side, left : left + self.side]
        return clean + self.noise * torch.randn(clean.shape), clean.clone()


def main() -> bool:
    """Read the sizes from the command line and train twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="50%", help="bytes, or a share of what a step adds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="steps of each run (default: %(default)s)")
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--side", type=int, default=128, help="side of a crop, a multiple of 8 (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8)
    sizes = parser.parse_args()
    pictures = NoisyPhotographs((sizes.steps + IN_TURN * PAIRS) * sizes.batch, sizes.side)
    return train_twice(
        make_model=lambda: UNet(sizes.width),
        make_data=lambda: DataLoader(pictures, sizes.batch),
        steps=sizes.steps,
        budget=sizes.budget,
    )


if __name__ == "__main__":
    sys.exit(not main())

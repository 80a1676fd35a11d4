"""Train with Lightning's command line, the modules and their arguments read from it: `lightning_main.py fit --...`."""

import lightning.pytorch as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoder(L.LightningModule):
    def __init__(self, width: int = 32, depth: int = 4, dropout: float = 0.1, output: str = "out.pt"):
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)) for _ in range(depth)]
        self.encoder, self.decoder = nn.Sequential(*layers), nn.Linear(width, width)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.decoder(self.encoder(batch[0])).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_fit_end(self):
        torch.save(self.state_dict(), self.hparams.output)


class Numbers(L.LightningDataModule):
    def __init__(self, width: int = 32, batch_size: int = 256):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        self.data = TensorDataset(torch.randn(1024, self.hparams.width, generator=generator))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=self.hparams.batch_size)


if __name__ == "__main__":
    LightningCLI(AutoEncoder, Numbers, seed_everything_default=7, save_config_callback=None)

"""Train what a Hydra configuration names: model and optimizer made by `instantiate`."""

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn


class MLP(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    torch.manual_seed(cfg.seed)
    model = instantiate(cfg.model)
    optimizer = instantiate(cfg.optimizer, params=model.parameters())
    for step in range(cfg.steps):
        loss = model(torch.randn(cfg.batch_size, cfg.model.width)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{step}: {loss.item():.10f}")
    torch.save(model.state_dict(), cfg.output)


if __name__ == "__main__":
    main()

"""Train a denoiser with Accelerate: frozen encoder, EMA, mixed precision, as diffusers' examples are written."""

import argparse
import copy

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F


class ResnetBlock(nn.Module):
    def __init__(self, channels, time_channels):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        self.conv1, self.conv2 = (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.time = nn.Linear(time_channels, channels)

    def forward(self, x, temb):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(temb)[:, :, None, None]
        return x + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.time_proj = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 16))
        self.conv_in, self.conv_out = nn.Conv2d(4, channels, 3, padding=1), nn.Conv2d(channels, 4, 3, padding=1)
        self.down, self.mid, self.up = (ResnetBlock(channels, 16) for _ in range(3))
        self.text = nn.Linear(12, 16)

    def forward(self, sample, timestep, encoder_hidden_states):
        temb = self.time_proj(timestep[:, None].float()) + self.text(encoder_hidden_states.mean(1))
        down = self.down(self.conv_in(sample), temb)
        middle = F.interpolate(self.mid(F.avg_pool2d(down, 2), temb), scale_factor=2.0)
        return self.conv_out(self.up(down + middle, temb))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_train_steps", type=int, default=6)
    parser.add_argument("--mixed_precision", default="no")
    parser.add_argument("--use_ema", action="store_true")
    parser.add_argument("--output", default="out.pt")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True, mixed_precision=args.mixed_precision)
    set_seed(0)
    vae, text_encoder = nn.Conv2d(3, 4, 4, stride=4), nn.Embedding(64, 12)
    unet = UNet()
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)
    unet.train()
    ema = copy.deepcopy(unet) if args.use_ema else None
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    dataset = [{"pixel_values": torch.rand(3, 64, 64), "input_ids": torch.randint(0, 64, (7,))} for _ in range(16)]
    loader = torch.utils.data.DataLoader(dataset, shuffle=True, batch_size=4)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    global_step = 0
    while global_step < args.max_train_steps:
        for batch in loader:
            with accelerator.accumulate(unet):
                latents = vae(batch["pixel_values"])
                noise = torch.randn_like(latents)
                timesteps = torch.randint(0, 1000, (latents.shape[0],))
                noisy = latents + noise * (timesteps / 1000)[:, None, None, None]
                prediction = unet(noisy, timesteps, text_encoder(batch["input_ids"]))
                loss = F.mse_loss(prediction.float(), noise.float(), reduction="mean")
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            global_step += 1
            if ema is not None:
                with torch.no_grad():
                    for kept, new in zip(ema.parameters(), unet.parameters(), strict=True):
                        kept.lerp_(new, 0.1)
            print(f"step {global_step} loss {loss.detach().item():.10f}")
            if global_step >= args.max_train_steps:
                break
    torch.save([accelerator.unwrap_model(unet).state_dict(), ema and ema.state_dict()], args.output)


if __name__ == "__main__":
    main()

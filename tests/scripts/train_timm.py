"""Train a classifier of timm with its optimizer, scheduler, mixup and model EMA, as its train.py is written."""

import argparse
from contextlib import suppress
from functools import partial

import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, ModelEmaV3, NativeScaler, random_seed

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="vit_tiny_patch16_224")
parser.add_argument("--updates", type=int, default=6)
parser.add_argument("--amp", action="store_true")
parser.add_argument("--grad-checkpointing", action="store_true")
parser.add_argument("--output", default="out.pt")


def train_one_epoch(args, model, loader, optimizer, loss_fn, scheduler, scaler, autocast, ema, mixup):
    model.train()
    meter = AverageMeter()
    for update, (input, target) in enumerate(loader):
        input, target = mixup(input, target)

        def _forward(input=input, target=target):
            with autocast():
                return loss_fn(model(input), target)

        loss = _forward()
        if scaler is not None:
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
        ema.update(model, step=update)
        meter.update(loss.item(), input.size(0))
        scheduler.step_update(num_updates=update)
        print(f"Train: {update} Loss: {meter.val:.10f} ({meter.avg:.6f})")


@torch.inference_mode()
def validate(model, loader):
    model.eval()
    return sum((model(input).argmax(1) == target).sum().item() for input, target in loader)


def main():
    args = parser.parse_args()
    random_seed(42, 0)
    model = create_model(
        args.model, img_size=32, patch_size=8, embed_dim=24, depth=8, num_heads=2, num_classes=10, drop_path_rate=0.1
    )
    model.set_grad_checkpointing(args.grad_checkpointing)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    autocast = partial(torch.autocast, device_type="cpu", dtype=torch.bfloat16) if args.amp else suppress
    scaler = NativeScaler() if args.amp and torch.cuda.is_available() else None
    ema = ModelEmaV3(model, decay=0.9)
    mixup = Mixup(mixup_alpha=0.8, num_classes=10)
    loader = [(torch.rand(8, 3, 32, 32), torch.randint(0, 10, (8,))) for _ in range(args.updates)]
    scheduler = CosineLRScheduler(optimizer, t_initial=args.updates)
    train_one_epoch(args, model, loader, optimizer, SoftTargetCrossEntropy(), scheduler, scaler, autocast, ema, mixup)
    print(f"top1 {validate(model, loader)} ema {validate(ema.module, loader)}")
    torch.save([model.state_dict(), ema.module.state_dict()], args.output)


if __name__ == "__main__":
    main()

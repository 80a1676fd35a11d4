"""Train a classifier with Accelerate, padded to the longest of each batch, as the examples without a Trainer are."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_scheduler


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="out.pt")
    return parser.parse_args()


def collate(examples):
    longest = max(len(words) for words, _ in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    mask = torch.zeros(len(examples), longest, dtype=torch.long)
    for row, (words, _) in enumerate(examples):
        ids[row, : len(words)], mask[row, : len(words)] = words, 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([label for _, label in examples])}


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    lengths = [32, 24] * 16
    data = [(torch.randint(5, 64, (length,)), index % 2) for index, length in enumerate(lengths)]
    loader = DataLoader(data, batch_size=args.per_device_train_batch_size, collate_fn=collate, shuffle=True)
    eval_loader = DataLoader(data[:8], batch_size=8, collate_fn=collate)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2
    )
    model = BertForSequenceClassification(config)
    no_decay = ["bias", "LayerNorm.weight"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-4)
    steps = args.num_train_epochs * len(loader)
    scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=steps)
    model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, eval_loader, scheduler
    )
    for epoch in range(args.num_train_epochs):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                accelerator.backward(outputs.loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            print(f"loss {outputs.loss.item():.10f}")
        model.eval()
        for batch in eval_loader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = accelerator.gather_for_metrics(outputs.logits.argmax(dim=-1))
        print(f"epoch {epoch}: {predictions.tolist()}")
    accelerator.wait_for_everyone()
    torch.save(accelerator.unwrap_model(model).state_dict(), args.output)


if __name__ == "__main__":
    main()

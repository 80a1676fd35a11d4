"""Train a causal language model with transformers' Trainer and HfArgumentParser, as its examples are written."""

from dataclasses import dataclass, field

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ModelArguments:
    n_layer: int = field(default=2)
    n_embd: int = field(default=32)


class GroupedTexts(Dataset):
    def __init__(self, rows, block_size=32):
        self.rows = torch.randint(0, 64, (rows, block_size), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main():
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    model_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    config = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=model_args.n_embd,
        n_layer=model_args.n_layer,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    trainer = Trainer(model=model, args=training_args, train_dataset=GroupedTexts(64), eval_dataset=GroupedTexts(8))
    train_result = trainer.train()
    trainer.log_metrics("train", {"train_loss": train_result.metrics["train_loss"]})
    trainer.evaluate()
    torch.save(model.state_dict(), f"{training_args.output_dir}/out.pt")


if __name__ == "__main__":
    main()

"""Train a causal language model with transformers' Trainer and HfArgumentParser, as its examples are written."""

from dataclasses import dataclass, field

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed

from tests.trainers import Sentences


@dataclass
class ModelArguments:
    n_layer: int = field(default=2)
    n_embd: int = field(default=32)


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
    trainer = Trainer(model=model, args=training_args, train_dataset=Sentences(64, 32), eval_dataset=Sentences(8, 32))
    train_result = trainer.train()
    trainer.log_metrics("train", {"train_loss": train_result.metrics["train_loss"]})
    trainer.evaluate()
    torch.save(model.state_dict(), f"{training_args.output_dir}/out.pt")


if __name__ == "__main__":
    main()

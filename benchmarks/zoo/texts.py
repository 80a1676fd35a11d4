"""Small language models of transformers, and batches of texts of given sizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WORDS, HEADS = 1000, 4


def make_batch(batch: int, *lengths: int) -> dict[str, Tensor]:
    """Make texts of a length, a padded one among them, and labels, of their own length where one is given."""

    def texts(length: int) -> tuple[Tensor, Tensor]:
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[0, length - max(1, length // 4) :] = 0
        return torch.randint(5, WORDS, (batch, length)), mask

    words, mask = texts(lengths[0])
    labels, is_label = (words, mask) if len(lengths) == 1 else texts(lengths[1])
    return {"input_ids": words, "attention_mask": mask, "labels": torch.where(is_label == 1, labels, -100)}


def build_model(name: str, width: int) -> nn.Module:
    """Build a model by its kind (lora: a Llama with adapters of peft; gpt2, bert, llama, t5) and number of layers."""
    import transformers

    kind, _, layers = name.partition("_")
    torch.manual_seed(0)
    given = {"vocab_size": WORDS, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    given |= {"num_hidden_layers": int(layers), "num_attention_heads": HEADS, "hidden_size": width}
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**given))
    elif kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**given, intermediate_size=4 * width))
    elif kind == "t5":
        given |= {"d_kv": width // HEADS, "d_ff": 4 * width, "decoder_start_token_id": 0}
        given |= {"num_layers": int(layers), "num_decoder_layers": int(layers)}
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**given))
    else:
        given |= {"intermediate_size": 5 * width // 2, "num_key_value_heads": HEADS // 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**given))
    if kind == "lora":
        import peft

        options = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.05, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, options)
    return model.train()

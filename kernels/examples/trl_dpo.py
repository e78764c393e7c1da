"""TRL's DPOTrainer: log-probabilities of the policy and of the reference come from this package."""

from copy import deepcopy

import cce_kernels
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer


def main(folder: str, device: str = "cuda" if torch.cuda.is_available() else "cpu", steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(1000)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=1000))
    names = ("prompt", "chosen", "rejected")
    data = {name: [" ".join(map(str, row)) for row in torch.randint(2, 1000, (8, 6)).tolist()] for name in names}
    on = {"use_cpu": device == "cpu", "bf16": device != "cpu", "report_to": "none", "logging_steps": 1}
    cce_kernels.register_in_trl()
    config, data = DPOConfig(folder, max_steps=steps, learning_rate=1e-2, **on), Dataset.from_dict(data)
    trainer = DPOTrainer(model, deepcopy(model), config, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

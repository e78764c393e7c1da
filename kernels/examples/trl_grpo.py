"""TRL's GRPOTrainer: log-probabilities and entropies, both differentiable, come from this package."""

import cce_kernels
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


def odd_words(completions: list[str], **_) -> list[float]:
    return [sum(int(word) % 2 for word in text.split()) for text in completions]


def main(folder: str, device: str = "cuda" if torch.cuda.is_available() else "cpu", steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(1000)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", padding_side="left")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model, data = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=1000)), {"prompt": ["2 3 4", "5 6", "7", "8 9"]}
    on = {"use_cpu": device == "cpu", "bf16": device != "cpu", "report_to": "none", "logging_steps": 1}
    sampled = {"num_generations": 4, "max_completion_length": 8, "entropy_coef": 0.01, "temperature": 0.9}
    config = GRPOConfig(folder, max_steps=steps, learning_rate=1e-2, **sampled, **on)
    cce_kernels.register_in_trl()
    trainer = GRPOTrainer(model, odd_words, config, train_dataset=Dataset.from_dict(data), processing_class=tokenizer)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

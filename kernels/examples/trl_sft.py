"""TRL's SFTTrainer. It has a fused head of its own; transformers' compute_loss asks the patched model instead."""

import cce_kernels
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer
from trl import SFTConfig, SFTTrainer


class OurLoss(SFTTrainer):
    compute_loss, prediction_step = Trainer.compute_loss, Trainer.prediction_step


def main(folder: str, device: str = "cuda" if torch.cuda.is_available() else "cpu", steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=1000))
    data = Dataset.from_dict({"input_ids": torch.randint(1000, (8, 32)).tolist()})
    on = {"use_cpu": device == "cpu", "bf16": device != "cpu", "report_to": "none", "logging_steps": 1}
    trainer = OurLoss(model, SFTConfig(folder, max_steps=steps, learning_rate=1e-2, **on), None, data, None, tokenizer)
    del trainer.model.forward  # TRL's fused head
    cce_kernels.patch_trainer(trainer)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

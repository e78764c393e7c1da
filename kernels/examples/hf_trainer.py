"""transformers' Trainer: label smoothing goes into the loss, and compute_metrics gets tokens instead of logits."""

from tempfile import TemporaryDirectory

import cce_kernels
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": (prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]).mean().item()}


def main(folder: str, device: str = "cuda" if torch.cuda.is_available() else "cpu", steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=1000))
    data = [{"input_ids": row, "labels": row} for row in torch.randint(1000, (8, 32))]
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}
    on = {"use_cpu": device == "cpu", "report_to": "none", "logging_steps": 1, "save_steps": steps}
    arguments = TrainingArguments(folder, max_steps=steps, learning_rate=1e-2, **batches, **on)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=accuracy)
    cce_kernels.patch_trainer(trainer).train()
    trainer.evaluate()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        print(main(folder))

"""Export a trained model as a Hugging Face directory that FLA's `from_pretrained` loads. No pickle is used.

    config.json, generation_config.json, model.safetensors     read by transformers, once `fla` is imported, on a GPU
    tokenizer.json, tokenizer_config.json                      for text; generated data has none
    linrnn_config.yaml                                         the run's configuration
    SHA256SUMS                                                 checked on loading, and by `sha256sum -c`
    README.md                                                  a model card to edit: data, losses, command, how to load

Parameters are always written in fp32. A run in bf16 keeps its decay rates in fp32, but config.json can name only one
dtype. The logits are then those of the run; `from_pretrained(dtype=…)` casts.
"""

import shlex
import shutil
from pathlib import Path

from safetensors import SafetensorError

from linrnn.config import overrides_of, to_yaml
from linrnn.config.schema import Config
from linrnn.core.checksums import write_checksums
from linrnn.core.errors import ConfigError, StorageError, UnsupportedError
from linrnn.core.files import read_object
from linrnn.inference.load import Trained
from linrnn.runs.directory import SUMMARY
from linrnn.runs.environment import without_machine_paths
from linrnn.training import checkpoint

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [linrnn, flash-linear-attention]
---
# {title}

{lines}

```bash
{command}
```

## Use

```python
from linrnn.inference import load_trained  # on a CPU or a GPU

model = load_trained(".").model

import fla  # without linrnn, on a GPU{flash}
import transformers

model = transformers.AutoModelForCausalLM.from_pretrained(".")
```
"""


def export(trained: Trained, output: Path) -> None:
    """Write `trained` to `output`, whole or not at all.

    Raises:
        ConfigError: `trained` is not from a run, or `output` exists already.
        UnsupportedError: its logits are capped.
        StorageError: `output` cannot be written.
    """
    if trained.config is None:
        raise ConfigError(f"{trained.source} is a Hugging Face directory already", "name a run or a checkpoint")
    if (softcap := trained.config.loss.softcap) is not None:
        raise UnsupportedError(
            f"{trained.source} has loss.softcap={softcap:g}, which FLA's configuration cannot express",
            "use the run itself: scripts/evaluate.py and scripts/generate.py take it",
        )
    check_output(output)
    partial = output.with_name(f".{output.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(trained, trained.config, partial)
        partial.rename(output)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(f"{output} cannot be written ({error})", "free space or choose another output") from error


def check_output(output: Path) -> None:
    """Raise a ConfigError if `output` exists already."""
    if output.exists():
        raise ConfigError(f"output={output} is there already", "choose another output, or move it away")


def _write(trained: Trained, config: Config, directory: Path) -> None:
    model = trained.model.float()
    model.config.use_cache = model.generation_config.use_cache = True
    model.save_pretrained(directory)
    for name, text in (trained.tokenizer.files() if trained.tokenizer else {}).items():
        (directory / name).write_text(text, encoding="utf-8")
    configuration = directory / "linrnn_config.yaml"
    configuration.write_text(to_yaml(config), encoding="utf-8")
    for file in directory.iterdir():
        shutil.copymode(configuration, file)  # safetensors gives its files to their owner alone
    write_checksums(directory)
    (directory / "README.md").write_text(_card(trained, config), encoding="utf-8")  # not checked: its owner edits it


def _card(trained: Trained, config: Config) -> str:
    """The model card of a run's checkpoint. Losses and tokens are there if the checkpoint is the run's last."""
    run, step = trained.source.parent.parent, checkpoint.read_progress(trained.source).step
    summary = read_object(run / SUMMARY) if (run / SUMMARY).exists() else {}
    lines = [
        f"* Model: {config.model.name}, {sum(x.numel() for x in trained.model.parameters()):,} parameters",
        f"* Data: {config.data.name}, a vocabulary of {trained.model.config.vocab_size:,}",
        f"* Training: {step:,} steps with loss={config.loss.name}",
    ]
    if summary.get("steps") == step:
        lines[-1] += f", {summary['tokens']:,} tokens, training loss {summary['train_loss_nats']:.4f} nats"
        if (valid := summary.get("valid_loss_nats")) is not None:
            lines.append(f"* Validation: {valid:.4f} nats a token, perplexity {summary['valid_perplexity']:.2f}")
    command = shlex.join(["python", "train.py", *without_machine_paths(overrides_of(config))])
    flash = ", with the flash_attn package" * (trained.model.config.model_type == "transformer")
    return CARD.format(title=run.name, lines="\n".join(lines), command=command, flash=flash)

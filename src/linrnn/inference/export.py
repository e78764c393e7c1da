"""A trained model as a Hugging Face directory that FLA's `from_pretrained` loads: safetensors and JSON alone.

    config.json, generation_config.json, model.safetensors     what transformers reads, once `fla` is imported
    tokenizer.json, tokenizer_config.json                      of text; generated data have none
    linrnn_config.yaml                                         the run's configuration
    SHA256SUMS                                                 of these files; loading compares, and `sha256sum -c` does

Parameters are written in fp32 whatever a run keeps them in: decay rates stay in fp32 beside bf16 weights, and one
file has one dtype in config.json. The logits are then the run's own; `from_pretrained(dtype=…)` casts.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from linrnn.config import to_yaml
from linrnn.core.checksums import write_checksums
from linrnn.core.errors import ConfigError, DataError, StorageError
from linrnn.inference.load import Trained
from linrnn.models import open_pretrained


def export(trained: Trained, output: Path) -> None:
    """Write `trained` to `output`, whole or not at all, and read it back to compare every parameter.

    Raises:
        ConfigError: it is no run's, or `output` is there already.
        StorageError: it cannot be written.
        DataError: what was written does not come back as it was.
    """
    if trained.config is None:
        raise ConfigError(f"{trained.source} is a Hugging Face directory already", "name a run or a checkpoint")
    if output.exists():
        raise ConfigError(f"output={output} is there already", "choose another output, or move it away")
    partial = output.with_name(f".{output.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(trained, partial)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise StorageError(f"{output} cannot be written ({reason})", "free space or choose another output") from error
    try:
        _compare(trained.model, partial)
    except DataError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    try:
        partial.rename(output)
    except OSError as error:
        raise StorageError(f"{output} cannot be written ({error.strerror})", "choose another output") from error


def _write(trained: Trained, directory: Path) -> None:
    assert trained.config is not None
    model = trained.model.float()
    settings = {"use_cache": True, "bos_token_id": None, "eos_token_id": trained.eos_id, "pad_token_id": trained.eos_id}
    for target in (model.config, model.generation_config):
        for name, value in settings.items():
            setattr(target, name, value)
    model.save_pretrained(directory)
    for name, text in (trained.tokenizer.files() if trained.tokenizer else {}).items():
        (directory / name).write_text(text, encoding="utf-8")
    (directory / "linrnn_config.yaml").write_text(to_yaml(trained.config), encoding="utf-8")
    write_checksums(directory)


def _compare(model: Any, directory: Path) -> None:
    written = open_pretrained(directory, torch.device("cpu")).state_dict()
    expected = model.state_dict()
    different = [n for n in expected if n not in written or not torch.equal(expected[n].cpu(), written[n])]
    if different or written.keys() - expected.keys():
        raise DataError(f"{different[0] if different else 'a parameter'} does not come back as it was", "report this")

"""Small texts, tokenizers and configurations for the data tests."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linrnn.config.schema import HubDataConfig, MarkovDataConfig, TextDataConfig
from linrnn.data import ShardSet
from linrnn.data.shards import SplitWriter, read_meta, write_meta
from linrnn.data.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "über-fast", "naïve", "東京", "trains", "ran;", "12", "3.5"]


def sentences(n: int, seed: int = 0) -> list[str]:
    """n documents of a few words each, some of them not ASCII."""
    random = np.random.RandomState(seed)
    return [" ".join(random.choice(WORDS, size=random.randint(1, 40))) + f" {i}.\n" for i in range(n)]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return path


def write_tokenizer(path: Path, vocab_size: int = 300) -> Path:
    path.write_text(train_tokenizer(sentences(200), vocab_size).json)
    return path


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {**values, **{key: str(value) if isinstance(value, Path) else value for key, value in changes.items()}}


def common(name: str, cache_dir: Path) -> dict[str, Any]:
    return {"name": name, "cache_dir": str(cache_dir), "verify": True, "reset_at_document": False}


TOKENS = {"tokenizer": None, "tokenizer_vocab_size": 300, "max_tokens": None, "valid_fraction": 0.1}


def text_config(cache_dir: Path, path: Path | str | list[str], **changes: Any) -> TextDataConfig:
    values = {**common("text", cache_dir), **TOKENS, "path": path if isinstance(path, list) else str(path)}
    values |= {"sources": [], "valid_path": None, "text_field": "text", "document_separator": None}
    return TextDataConfig(**changed(values, changes))


def hub_config(cache_dir: Path, path: Path | str, **changes: Any) -> HubDataConfig:
    values = {**common("wikitext103", cache_dir), **TOKENS, "path": str(path), "subset": None, "train_split": "train"}
    values |= {"valid_split": "validation", "text_field": "text", "document_start": None, "empty_row": ""}
    return HubDataConfig(**changed({**values, "streaming": True}, changes))


def markov_config(cache_dir: Path, **changes: Any) -> MarkovDataConfig:
    sizes = {"vocab_size": 64, "branching": 4, "n_tokens": 200_000, "n_valid_tokens": 20_000, "data_seed": 0}
    return MarkovDataConfig(**{**common("markov", cache_dir), **sizes, **changes})


def shard_set(directory: Path, documents: list[np.ndarray], vocab_size: int = 1000) -> ShardSet:
    """The documents as a training split on disk."""
    directory.mkdir()
    dtype = np.dtype("<u2")
    writer = SplitWriter(directory, "train", dtype)
    for document in documents:
        writer.append(document, np.array([len(document)]), 0)
    write_meta(directory, {"format": 1, "vocab_size": vocab_size, "splits": {"train": writer.finish()}})
    return ShardSet.open(directory, read_meta(directory), "train")


def directory_bytes(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def shared_data() -> Path:
    """The folder of real text for development, which is not part of the repository. Without it the test is skipped."""
    for root in (os.environ.get("LINRNN_SHARED"), ROOT.parent / "shared"):
        if root and (Path(root) / "data").is_dir():
            return Path(root) / "data"
    pytest.skip("no shared data: set LINRNN_SHARED")

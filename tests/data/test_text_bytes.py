"""Bits per byte use the bytes of exactly the evaluated labels."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from data_helpers import markov_config, sentences, text_config, write_jsonl, write_tokenizer
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers

from linrnn.config.schema import LossConfig
from linrnn.data import BatchesOnce, PreparedData, prepare
from linrnn.losses import build_loss
from linrnn.training.evaluation import evaluate

CPU = torch.device("cpu")
TEXTS = [f"Text {i}: {text}" for i, text in enumerate(sentences(120))]


def byte_fallback(path: Path) -> Path:
    """Like SentencePiece for Llama and Mistral: a space before the text, and bytes for characters without a token."""
    pieces = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁Tetxhcason:0123456789ü", "▁T", "▁c", "xt"]
    merges = [("▁", "T"), ("▁", "c"), ("x", "t")]
    tokenizer = HfTokenizer(
        models.BPE({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, merges, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    path.write_text(tokenizer.to_str())
    return path


def prepared(texts: list[str], tokenizer: Path, tmp_path: Path) -> PreparedData:
    path = write_jsonl(tmp_path / "texts.jsonl", texts)
    return prepare(text_config(tmp_path / "cache", path, valid_path=path, tokenizer=tokenizer))


class Uniform(torch.nn.Module):
    """Gives every token of a vocabulary the same probability."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, input_ids: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(*input_ids.shape, 4)

    def head(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.vocab_size, 4)


def evaluated(batches: BatchesOnce, vocab_size: int) -> float | None:
    model: Any = Uniform(vocab_size)
    loss = build_loss(LossConfig("standard"), device=CPU)
    return evaluate(model, loss, batches, precision="fp32", device=CPU).bits_per_byte


@pytest.mark.parametrize("write", [write_tokenizer, byte_fallback])
def test_bits_per_byte_are_of_the_labels_that_were_read(write, tmp_path):
    """A uniform model spends log2 V bits on each label. A part has other bytes per label than the split."""
    data = prepared(TEXTS, write(tmp_path / "tokenizer.json"), tmp_path)
    first = len(data.tokenizer.decode(data.valid.read(0, 1).tolist()).encode())
    for of_part in (1, 20, 120):
        n_labels = int(data.valid.document_ends[of_part - 1]) - 1
        n_bytes = sum(len(text.encode()) for text in TEXTS[:of_part]) - first
        for rows in (2, 40):
            batches = BatchesOnce(data.valid, 16, rows, n_labels, tokenizer=data.tokenizer)
            assert batches.n_bytes == pytest.approx(n_bytes, abs=7 * len(batches)), "a batch may end within a character"
            bits = n_labels * math.log2(data.vocab_size) / batches.n_bytes
            assert evaluated(batches, data.vocab_size) == pytest.approx(bits, rel=1e-6)


def test_labels_that_stand_for_no_text_have_no_bits_per_byte(tmp_path):
    data = prepare(markov_config(tmp_path / "cache"))
    assert evaluated(BatchesOnce(data.valid, 16, 2, 100, tokenizer=data.tokenizer), data.vocab_size) is None
    text = prepared(["a", "a"], write_tokenizer(tmp_path / "tokenizer.json"), tmp_path)
    assert evaluated(BatchesOnce(text.valid, 1, 1, 1, tokenizer=text.tokenizer), text.vocab_size) is None

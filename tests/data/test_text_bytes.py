"""Bits per byte use the bytes of exactly the evaluated labels, or are not reported."""

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_helpers import markov_config, sentences, text_config, write_jsonl, write_tokenizer
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

import linrnn.data.shards
from linrnn.config.schema import LossConfig
from linrnn.data import BatchesOnce, PreparedData, prepare
from linrnn.data.tokenizer import Tokenizer
from linrnn.losses import build_loss
from linrnn.training.evaluation import evaluate

PREPARE = import_module("linrnn.data.prepare")  # the package has a function of this name

CPU = torch.device("cpu")
TEXTS = [f"Text {i}: {text}" for i, text in enumerate(sentences(120))]  # first tokens are never part of a character


def byte_level(path: Path) -> Path:
    return write_tokenizer(path)


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


@pytest.fixture(params=[byte_level, byte_fallback])
def data(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedData:
    """Tokenised in several batches, and counted in several pieces."""
    monkeypatch.setattr(PREPARE, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(linrnn.data.shards, "COUNTED_TOKENS", 100)
    return prepared(TEXTS, request.param(tmp_path / "tokenizer.json"), tmp_path)


def prepared(texts: list[str], tokenizer: Path, tmp_path: Path) -> PreparedData:
    path = write_jsonl(tmp_path / "texts.jsonl", texts)
    return prepare(text_config(tmp_path / "cache", path, valid_path=path, tokenizer=tokenizer))


def bytes_of_labels(data: PreparedData, max_tokens: int, reset: bool) -> int | None:
    """Bytes as the tokenizer decodes the labels document by document; None if they end within a character."""
    start, total = 0, 0
    for end in data.valid.document_ends.tolist():
        found = bytes_of_document(data, start, min(end, max_tokens + 1), reset or start == 0)
        if found is None:
            return None
        total += found
        if end > max_tokens:
            break
        start = end
    return total


def bytes_of_document(data: PreparedData, start: int, end: int, without_first: bool) -> int | None:
    tokenizer = data.tokenizer
    assert tokenizer is not None
    ids = [i for i in data.valid.read(start, end) if i != tokenizer.eos_id]
    texts = [tokenizer.decode(ids), tokenizer.decode(ids[:1]) if without_first else ""]
    if any("\ufffd" in text for text in texts):
        return None
    return len(texts[0].encode()) - len(texts[1].encode())


@pytest.mark.parametrize("reset", [False, True])
def test_a_pass_over_any_part_counts_its_labels_bytes(data, reset):
    token_bytes = data.token_bytes(data.valid, pytest.fail)
    compared = 0
    for max_tokens in (*range(1, 150), *range(150, data.valid.n_tokens, 61), data.valid.n_tokens - 1):
        rows = 3 if max_tokens < 150 else 31  # larger batches make long parts quick
        batches = list(
            BatchesOnce(data.valid, 11, rows, max_tokens, reset_at_document=reset, token_bytes=token_bytes)
        )  # fmt: skip
        expected = bytes_of_labels(data, max_tokens, reset)
        if expected is not None:
            assert sum(batch.n_bytes or 0 for batch in batches) == expected, max_tokens
            compared += 1
    assert compared > 150


def test_all_tokens_stand_for_all_of_the_text(data):
    assert data.tokenizer is not None
    token_bytes = data.token_bytes(data.valid, pytest.fail)
    assert token_bytes is not None
    texts = ["", "a", " a", "\n\ta", "naïve 東京 🙂", *TEXTS[:20]]
    for text, ids in zip(texts, data.tokenizer.encode_batch(texts), strict=True):
        assert token_bytes.count(np.array(ids, np.int64), bool(text)) == len(text.encode()), text
    assert token_bytes.count(np.array([data.tokenizer.eos_id]), 0) == 0


class Uniform(torch.nn.Module):
    """Gives every token of a vocabulary the same probability."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, input_ids: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(*input_ids.shape, 4)

    def head(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.vocab_size, 4)


def test_bits_per_byte_are_of_the_labels_that_were_read(data):
    """A uniform model spends log2 V bits on each label. The part has other bytes per token than the split."""
    token_bytes = data.token_bytes(data.valid, pytest.fail)
    batches = BatchesOnce(data.valid, 16, 2, 100, token_bytes=token_bytes)
    found = evaluated(batches, data.vocab_size)
    n_bytes = bytes_of_labels(data, 100, reset=False)
    assert n_bytes
    assert found == pytest.approx(100 * math.log2(data.vocab_size) / n_bytes, rel=1e-6)
    by_the_split = math.log2(data.vocab_size) * data.valid.n_tokens / data.valid.n_bytes
    assert found != pytest.approx(by_the_split, rel=1e-3)


def evaluated(batches: Any, vocab_size: int) -> float | None:
    model: Any = Uniform(vocab_size)
    loss = build_loss(LossConfig("standard"), device=CPU)
    return evaluate(model, loss, batches, precision="fp32", device=CPU).bits_per_byte


def test_labels_that_stand_for_no_text_have_no_bits_per_byte(tmp_path):
    data = prepare(markov_config(tmp_path / "cache"))
    assert data.token_bytes(data.valid, pytest.fail) is None
    assert evaluated(BatchesOnce(data.valid, 16, 2, 100), data.vocab_size) is None
    text = prepared(["a", "a"], byte_level(tmp_path / "tokenizer.json"), tmp_path)
    token_bytes = text.token_bytes(text.valid, pytest.fail)
    only_an_end = BatchesOnce(text.valid, 1, 1, 1, token_bytes=token_bytes)
    assert evaluated(only_an_end, text.vocab_size) is None


def misspelling(kind: str, path: Path) -> tuple[Path, str]:
    """A tokenizer, and a text that decoding does not give back byte for byte."""
    if kind == "words":
        words = HfTokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "text": 2}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        path.write_text(words.to_str())
        return path, "a text"
    if kind == "the sign for a space":
        return byte_fallback(path), "a ▁ text"
    bpe = HfTokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "a space put before some texts")
    bpe.decoder = decoders.ByteLevel()
    if kind == "a normal form":
        bpe.normalizer = normalizers.NFC()
    alphabet = [] if kind == "bytes left out" else pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    path.write_text(bpe.to_str())
    texts = {"a normal form": "e\u0301", "bytes left out": "🙂 text", "a space put before some texts": " text"}
    return path, texts[kind]


@pytest.mark.parametrize(
    "kind", ["words", "the sign for a space", "a normal form", "bytes left out", "a space put before some texts"]
)
def test_what_a_tokenizer_does_not_give_back_is_said_and_not_estimated(kind, tmp_path):
    path, text = misspelling(kind, tmp_path / "tokenizer.json")
    said: list[str] = []
    data = prepared([*TEXTS, text], path, tmp_path)
    assert data.token_bytes(data.valid, said.append) is None
    assert "no bits per byte" in said[0]
    assert str(path) in said[0]
    assert "data.tokenizer=" in said[1]
    if kind != "words":
        assert f"its text has {data.valid.n_bytes:,}" in said[0]
        without = prepared(TEXTS, path, tmp_path)
        assert without.token_bytes(without.valid, pytest.fail) is not None


def test_tokens_added_to_a_vocabulary_stand_for_what_they_say(tmp_path):
    tokenizer = HfTokenizer.from_str(byte_level(tmp_path / "plain.json").read_text())
    tokenizer.add_tokens(["東京 tower"])
    tokenizer.add_special_tokens(["<pad>"])
    loaded = Tokenizer(tokenizer.to_str(), "with two more")
    token_bytes = loaded.token_bytes()
    assert token_bytes is not None
    ids = loaded.encode("a 東京 tower <pad>")
    assert tokenizer.token_to_id("東京 tower") in ids
    assert token_bytes.count(np.array(ids), 1) == len("a 東京 tower <pad>".encode())
    assert token_bytes.of_ids[tokenizer.token_to_id("<pad>")] == 0

"""Tokenizers: a Hugging Face `tokenizers` JSON (also .json.xz), a directory, a hub name, or a BPE trained here.

Text is always encoded as plain text. A special token written out in a document ("<|endoftext|>" in a web page) becomes
ordinary tokens. Nothing is added, truncated, padded or left to chance (BPE dropout), whatever the tokenizer's file
says.
"""

import hashlib
import json
import lzma
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from linrnn.core.errors import DataError, first_line

# The first of these names that the vocabulary has is the end token, unless tokenizer_config.json names another.
EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|endofdocument|>", "<eos>", "[EOS]")
SPACE = "▁"  # SentencePiece's symbol for a space


@dataclass(frozen=True)
class TokenBytes:
    """The number of UTF-8 bytes of text that each token stands for.

    Attributes:
        of_ids: (vocab_size,) int64, bytes of each id. 0 for the end token, other special tokens and unused ids.
        put_first: bytes that the tokenizer adds before every text. A text's first token stands for that many less.
    """

    of_ids: np.ndarray
    put_first: int

    def count(self, ids: np.ndarray, n_texts: int) -> int:
        """Bytes that `ids` stand for, if `n_texts` of the ids are the first of a text."""
        return int(self.of_ids[ids].sum()) - n_texts * self.put_first


class Tokenizer:
    """A tokenizer, reduced to what pretraining needs.

    Attributes:
        name: what the user asked for, for messages.
        json: the tokenizer's own JSON.
        vocab_size: the largest id + 1. Ids may have gaps, so this is not the number of entries.
        eos_token, eos_id: the token that ends a document; both None if the vocabulary has none.
        dropout: the BPE dropout that the file asks for; None if it asks for none. Encoding here never applies it.
        hash: sha256 (hex) of the file and the end token. Files that differ in their dropout alone encode alike here.
    """

    def __init__(self, json_text: str, name: str, eos_token: str | None = None) -> None:
        try:
            self._tokenizer = HfTokenizer.from_str(json_text)
        except Exception as error:  # the library raises a bare Exception
            raise DataError(
                f"{name} is not a Hugging Face tokenizers JSON: {first_line(error)}",
                "give a tokenizer.json as written by tokenizers or transformers",
            ) from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.dropout: float | None = None
        if isinstance(self._tokenizer.model, models.BPE):
            self.dropout = self._tokenizer.model.dropout or None
            self._tokenizer.model.dropout = None
        self.json = json_text
        self.name = name
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{name} has an empty vocabulary", "give a trained tokenizer")
        if eos_token is not None and eos_token not in vocabulary:
            raise DataError(
                f"the end token {eos_token!r} of {name} is not in its vocabulary",
                "correct eos_token in its tokenizer_config.json",
            )
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.eos_token = eos_token or next((known for known in EOS_NAMES if known in vocabulary), None)
        self.eos_id: int | None = None if self.eos_token is None else vocabulary[self.eos_token]
        self.hash = hashlib.sha256(f"{self.eos_id}\n{json_text}".encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, computed in parallel on all cores. No end token is added."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def files(self) -> dict[str, str]:
        """Names and contents of the files from which :func:`load_tokenizer` and transformers' AutoTokenizer load it."""
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        if self.eos_token is not None:
            settings |= {"eos_token": self.eos_token}
        return {"tokenizer.json": self.json, "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}

    def without_dropout(self) -> "Tokenizer":
        """The same tokenizer, whose files ask for no dropout. Other libraries apply what a tokenizer.json asks for."""
        if self.dropout is None:
            return self
        content = json.loads(self.json)
        content["model"]["dropout"] = None
        return Tokenizer(json.dumps(content, ensure_ascii=False), self.name, self.eos_token)

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self.encode_batch([text])[0]

    def token_bytes(self) -> TokenBytes | None:
        """The bytes of each token, or None if the tokenizer is neither byte-level nor has byte fallback.

        The counts hold only if decoding gives back the text as it was. A tokenizer with a normalizer changes the text.
        """
        decoders = set(_types(json.loads(self.json).get("decoder")))
        if decoders.isdisjoint(("ByteLevel", "ByteFallback")):
            return None
        of_ids = np.zeros(self.vocab_size, np.int64)
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            if "ByteLevel" in decoders:  # each character stands for one byte
                of_ids[token_id] = len(token)
            elif re.fullmatch("<0x[0-9A-F]{2}>", token):
                of_ids[token_id] = 1
            else:
                of_ids[token_id] = len(token.replace(SPACE, " ").encode())
        for token_id, added in self._tokenizer.get_added_tokens_decoder().items():
            of_ids[token_id] = 0 if added.special else len(added.content.encode())
        if self.eos_id is not None:
            of_ids[self.eos_id] = 0
        return TokenBytes(of_ids, int(of_ids[self.encode("a")].sum()) - 1)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def load_tokenizer(spec: str) -> Tokenizer:
    """Load a tokenizer.

    Args:
        spec: a .json or .json.xz file, a directory that holds a tokenizer.json, or the name of a hub repository.

    Raises:
        DataError: the tokenizer does not exist, cannot be fetched, or cannot be parsed.
    """
    path = Path(spec).expanduser()
    if path.is_dir():
        return _load_directory(path, spec)
    if path.is_file():
        return Tokenizer(_read_json_text(path), str(path))
    if path.suffix in (".json", ".xz") or spec.startswith((".", "/", "~")) or spec.count("/") > 1:
        raise DataError(f"tokenizer {spec} does not exist", "correct data.tokenizer, or use null to train one here")
    return _load_directory(_fetch_from_hub(spec), spec)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (GPT-2's pre-tokenizer) with <|endoftext|> as id 0. The same texts give the same
    tokenizer.

    Args:
        texts: the sample to learn from; the caller chooses its size.
        vocab_size: entries wanted, at least 257 (256 bytes and the end token).

    Raises:
        DataError: the sample is too small to learn that many entries.
    """
    bpe = HfTokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_NAMES[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    learned = bpe.get_vocab_size()
    if learned != vocab_size:
        raise DataError(
            f"the text is too small to learn a vocabulary of {vocab_size:,} tokens: it gave {learned:,}",
            f"lower data.tokenizer_vocab_size to at most {learned:,}, give more text, or set data.tokenizer",
        )
    return Tokenizer(bpe.to_str(), f"byte-level BPE of {vocab_size:,} entries trained here")


def _types(decoder: dict[str, Any] | None) -> Iterator[str]:
    """The type of a decoder, and the types of its parts."""
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _types(part)


def _load_directory(path: Path, name: str) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"tokenizer {name} has no tokenizer.json", "give one with a (fast) tokenizer.json")
    eos_token = None
    settings_file = path / "tokenizer_config.json"
    if settings_file.is_file():
        try:
            settings: dict[str, Any] = json.loads(settings_file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{settings_file} is not JSON: {error}", "correct or remove that file") from None
        eos_token = settings.get("eos_token")
        if isinstance(eos_token, dict):  # an AddedToken written out
            eos_token = eos_token.get("content")
    return Tokenizer(_read_json_text(file), name, eos_token)


def _read_json_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")
    except (OSError, lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"tokenizer {path} cannot be read: {error}", "give an intact .json or .json.xz file") from None


def _fetch_from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=["tokenizer.json", "tokenizer_config.json"])
    except Exception as error:  # requests, hub and validation errors share no base class
        raise DataError(
            f"tokenizer {name} is neither a local file nor available from the hub: {first_line(error)}",
            "check the name and the connection, or give a local tokenizer.json, or null to train one here",
        ) from None
    return Path(folder)

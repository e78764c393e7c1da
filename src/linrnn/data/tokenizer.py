"""Tokenizers: a Hugging Face `tokenizers` JSON (also compressed), a directory, a hub name, or a BPE trained here.

The end token is the one that transformers would use: that of the settings which lie beside a tokenizer.json. A file
without settings gets the first of `EOS_NAMES` that its vocabulary has.

Text is always encoded as plain text. A special token written out in a document ("<|endoftext|>" in a web page) becomes
ordinary tokens. Nothing is added, truncated or padded, whatever the tokenizer's file says.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from linrnn.core.errors import DataError, first_line
from linrnn.data.readers import DAMAGE, DECOMPRESSORS, read_pieces

FILE = "tokenizer.json"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|endofdocument|>", "<eos>", "[EOS]")


class Tokenizer:
    """A tokenizer, reduced to what pretraining needs.

    Attributes:
        name: what the user asked for, for messages.
        json: the tokenizer's own JSON.
        vocab_size: the largest id + 1. Ids may have gaps, so this is not the number of entries.
        eos_token, eos_id: the token that ends a document; both None if the vocabulary has none.
        hash: sha256 (hex) of the JSON and the end token.
    """

    def __init__(self, json_text: str, name: str, eos_token: str | None = None, *, guess: bool = True) -> None:
        """
        Args:
            eos_token: the end token.
            guess: without `eos_token`, look for one of `EOS_NAMES` in the vocabulary.

        Raises:
            DataError: `json_text` is no tokenizer, or lacks `eos_token`.
        """
        try:
            self._tokenizer = HfTokenizer.from_str(json_text)
        except Exception as error:  # the library raises a bare Exception
            cause = f"{name} is not a Hugging Face tokenizers JSON: {first_line(error)}"
            raise DataError(cause, "give a tokenizer.json as written by tokenizers or transformers") from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.json, self.name = json_text, name
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{name} has an empty vocabulary", "give a trained tokenizer")
        if eos_token is not None and eos_token not in vocabulary:
            cause = f"the end token {eos_token!r} of {name} is not in its vocabulary"
            raise DataError(cause, f"correct eos_token in its {' or '.join(SETTINGS)}")
        if eos_token is None and guess:
            eos_token = next((known for known in EOS_NAMES if known in vocabulary), None)
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.eos_token = eos_token
        self.eos_id: int | None = None if eos_token is None else vocabulary[eos_token]
        self.hash = hashlib.sha256(f"{self.eos_id}\n{json_text}".encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, computed in parallel on all cores. No end token is added.

        Raises:
            DataError: the tokenizer has no token for a part of the text.
        """
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises a bare Exception
            raise DataError(
                f"tokenizer {self.name} cannot encode the text: {first_line(error)}",
                "give it a token for unknown text (unk_token), or use another data.tokenizer",
            ) from None
        return [encoding.ids for encoding in encodings]

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def files(self) -> dict[str, str]:
        """Names and contents of the files from which :func:`load_tokenizer` and transformers' AutoTokenizer load it."""
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings["eos_token"] = self.eos_token
        return {FILE: self.json, SETTINGS[0]: json.dumps(settings, indent=2) + "\n"}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (GPT-2's pre-tokenizer) with <|endoftext|> as id 0. The same texts give the same
    tokenizer.

    Args:
        texts: the sample to learn from; the caller chooses its size.
        vocab_size: at least 257 (256 bytes and the end token). A small sample gives fewer.
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
    return Tokenizer(bpe.to_str(), f"byte-level BPE of {bpe.get_vocab_size():,} entries trained here")


def load_tokenizer(spec: str) -> Tokenizer:
    """Load a tokenizer.

    Args:
        spec: a .json file, also compressed; a directory that holds a tokenizer.json; or the name of a hub repository.

    Raises:
        DataError: the tokenizer does not exist, cannot be fetched, or cannot be parsed.
    """
    path = Path(spec).expanduser()
    if not path.exists():
        named = path.suffix == ".json" or path.suffix in DECOMPRESSORS
        if named or spec.startswith((".", "/", "~")) or spec.count("/") > 1:
            raise DataError(f"tokenizer {spec} does not exist", "correct data.tokenizer, or use null to train one here")
        path = _fetch_from_hub(spec)
    if path.is_dir():
        path /= FILE
        if not path.is_file():
            raise DataError(f"tokenizer {spec} has no {FILE}", f"give one with a (fast) {FILE}")
    try:
        content = b"".join(read_pieces(path)).decode("utf-8")
    except (UnicodeDecodeError, *DAMAGE) as error:
        raise DataError(f"tokenizer {path} cannot be read: {first_line(error)}", "fetch the file again") from None
    if path.name == FILE and any(path.with_name(settings).is_file() for settings in SETTINGS):
        return Tokenizer(content, spec, _end_token_of_transformers(path.parent), guess=False)
    return Tokenizer(content, spec)


def _fetch_from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[FILE, *SETTINGS, "config.json"]))
    except Exception as error:  # requests, hub and validation errors share no base class
        raise DataError(
            f"tokenizer {name} is neither a local file nor available from the hub: {first_line(error)}",
            "check the name and the connection, or give a local tokenizer.json, or null to train one here",
        ) from None


def _end_token_of_transformers(directory: Path) -> str | None:
    """The end token of a tokenizer.json with the settings in `directory`."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    for loader in (AutoTokenizer, PreTrainedTokenizerFast):  # the second if its class is not transformers' own
        try:
            return loader.from_pretrained(directory, local_files_only=True, trust_remote_code=False).eos_token
        except Exception as failure:  # whatever the settings hold reaches the classes unchecked
            error = failure
    raise DataError(
        f"transformers cannot read the settings of the tokenizer in {directory} ({first_line(error)})",
        f"correct its {' or '.join(SETTINGS)}, or write eos_token there",
    )

"""Tokenizers: decoding gives the text back, nothing is added, and errors name an unusable tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from data_helpers import sentences, shared_data, write_tokenizer
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer

from linrnn.core.errors import DataError
from linrnn.data.tokenizer import load_tokenizer, train_tokenizer


def test_any_text_comes_back_from_a_tokenizer_trained_here():
    tokenizer = train_tokenizer(sentences(50), 300)
    texts = ["", "plain", "  two  spaces\n\n\ttab", "東京 naïve 🙂", *sentences(20, seed=1)]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
    assert tokenizer.vocab_size == 300
    assert (tokenizer.eos_token, tokenizer.eos_id) == ("<|endoftext|>", 0)


def test_a_special_token_written_in_the_text_stays_text():
    tokenizer = train_tokenizer(sentences(50), 300)
    (ids,) = tokenizer.encode_batch(["before <|endoftext|> after"])
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "before <|endoftext|> after"


ADDED = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
DECODER = {"added_tokens_decoder": {"0": {**ADDED, "content": "<|endoftext|>", "special": True}}}
Settings = dict[str, Any] | None


def with_end_tokens(directory: Path, config: Settings, special: Settings, model: Settings = None) -> Path:
    """A folder with a tokenizer whose vocabulary has three end tokens, and these settings."""
    directory.mkdir(exist_ok=True)
    bpe = HfTokenizer.from_str(train_tokenizer(sentences(50), 300).json)
    bpe.add_special_tokens(["<|im_end|>", "</s>"])
    bpe.save(str(directory / "tokenizer.json"))
    files = {"tokenizer_config.json": config, "special_tokens_map.json": special, "config.json": model}
    for name, content in files.items():
        if content is not None:
            (directory / name).write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("config", "special"),
    [
        ({**FAST, "eos_token": "<|im_end|>"}, None),
        ({**FAST, "eos_token": {"__type": "AddedToken", **ADDED}}, None),
        (FAST, None),
        ({}, None),
        ({"tokenizer_class": "GPT2Tokenizer"}, None),
        ({"tokenizer_class": "Unheard"}, None),
        (None, {"eos_token": "<|im_end|>"}),
        (FAST, {"eos_token": "<|im_end|>"}),
        (FAST, {"eos_token": None}),
        ({**FAST, "eos_token": "</s>"}, {"eos_token": "<|im_end|>"}),
        ({**FAST, **DECODER, "eos_token": "</s>"}, {"eos_token": "<|im_end|>"}),
        ({**FAST, "eos_token": "</s>"}, {"eos_token": None}),
    ],
)
def test_the_end_token_is_that_of_transformers_by_any_name(config, special, tmp_path, monkeypatch):
    directory = with_end_tokens(tmp_path / "own", config, special)
    expected = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    (tmp_path / "link").symlink_to("own")
    monkeypatch.chdir(tmp_path)
    for spec in ("own", "own/", "own/tokenizer.json", "link", str(directory)):
        tokenizer = load_tokenizer(spec)
        assert (tokenizer.eos_token, tokenizer.eos_id) == (expected.eos_token, expected.eos_token_id), spec


def test_a_file_without_settings_gets_the_first_known_end_token(tmp_path):
    with_end_tokens(tmp_path / "own", None, None)
    (tmp_path / "own/other.json").write_bytes((tmp_path / "own/tokenizer.json").read_bytes())
    assert {
        load_tokenizer(str(tmp_path / f"own{name}")).eos_token for name in ("", "/tokenizer.json", "/other.json")
    } == {"<|endoftext|>"}


@pytest.mark.parametrize("eos_token", [None, "</s>"])
def test_the_files_that_are_written_give_the_same_tokenizer(eos_token, tmp_path):
    directory = with_end_tokens(tmp_path / "own", {**FAST, "eos_token": eos_token}, None)
    tokenizer = load_tokenizer(str(directory))
    (tmp_path / "written").mkdir()
    for name, content in tokenizer.files().items():
        (tmp_path / "written" / name).write_text(content)
    for spec in ("written", "written/tokenizer.json"):
        again = load_tokenizer(str(tmp_path / spec))
        assert (again.hash, again.eos_token) == (tokenizer.hash, eos_token)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", "{"),
        ("special_tokens_map.json", "[" * 100_000),
        ("tokenizer_config.json", '{"eos_token": ["</s>"]}'),
        ("special_tokens_map.json", '{"eos_token": {"content": 3}}'),
        ("tokenizer_config.json", '{"eos_token": "<nowhere>"}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
    ],
)
def test_settings_that_cannot_be_used_are_named(file, content, tmp_path):
    cause = "is not in its vocabulary" if '": "' in content else "transformers cannot read the settings"
    directory = with_end_tokens(tmp_path / "own", None, None)
    (directory / file).write_text(content)
    for spec in (directory, directory / "tokenizer.json"):
        with pytest.raises(DataError, match=cause):
            load_tokenizer(str(spec))


def word_level() -> HfTokenizer:
    words = HfTokenizer(models.WordLevel({"cat": 0, "mat": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return words


def unigram() -> HfTokenizer:
    return HfTokenizer(models.Unigram([("cat", -1.0), ("mat", -2.0)]))


@pytest.mark.parametrize("make", [word_level, unigram])
def test_text_without_a_token_is_an_error_that_names_the_tokenizer(make, tmp_path):
    make().save(str(tmp_path / "words.json"))
    tokenizer = load_tokenizer(str(tmp_path / "words.json"))
    with pytest.raises(DataError, match=rf"tokenizer {tmp_path}/words\.json cannot encode the text") as error:
        tokenizer.encode("a dog")
    assert "unk_token" in error.value.remedy


def test_truncation_and_padding_in_the_file_are_not_applied(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(path.read_text())
    (full,) = load_tokenizer(str(path)).encode_batch(["a long text " * 20])
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    assert load_tokenizer(str(path)).encode_batch(["a long text " * 20]) == [full]


def test_gaps_in_the_ids_count_towards_the_vocabulary(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(path.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 999, "content": "<far>"})
    content["model"]["vocab"]["<far>"] = 999
    path.write_text(json.dumps(content))
    assert load_tokenizer(str(path)).vocab_size == 1000


@pytest.mark.parametrize(
    "content", [b"{", b'{"model": {"type": "none"}}', b"\xff\xfe", HfTokenizer(models.BPE()).to_str().encode()]
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    (tmp_path / "broken.json").write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.json"):
        load_tokenizer(str(tmp_path / "broken.json"))


def test_little_text_gives_the_entries_that_it_has():
    tokenizer = train_tokenizer(["abc abc"], 5000)
    assert 257 < tokenizer.vocab_size < 300
    assert tokenizer.decode(tokenizer.encode("abc 東京")) == "abc 東京"
    assert train_tokenizer([], 5000).vocab_size == 257


@pytest.mark.parametrize(
    ("file", "vocab_size", "eos_id"),
    [
        ("mistral-v1-32000", 32_000, 2),
        ("tekken-131072", 131_072, None),  # its file lacks the first thousand, special, ids
        ("own-bpe-wikibooks-262144", 262_144, 0),
    ],
)
def test_published_tokenizers_keep_text_whole(file, vocab_size, eos_id):
    tokenizer = load_tokenizer(str(shared_data() / "tokenizers" / f"{file}.tokenizer.json.xz"))
    texts = sentences(20)
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (vocab_size, eos_id)

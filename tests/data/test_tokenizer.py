"""Tokenizers: decoding gives the text back, nothing is added, and errors name an unusable tokenizer."""

import json
import lzma
from pathlib import Path

import pytest
from data_helpers import sentences, shared_data, write_tokenizer

from linrnn.core.errors import DataError
from linrnn.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer


def test_any_text_comes_back_from_a_tokenizer_trained_here() -> None:
    tokenizer = train_tokenizer(sentences(50), 300)
    texts = ["", "plain", "  two  spaces\n\n\ttab", "東京 naïve 🙂", *sentences(20, seed=1)]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
    assert tokenizer.vocab_size == 300
    assert (tokenizer.eos_token, tokenizer.eos_id) == ("<|endoftext|>", 0)


def test_training_twice_gives_the_same_tokenizer() -> None:
    assert train_tokenizer(sentences(300), 400).json == train_tokenizer(sentences(300), 400).json


def test_dropout_leaves_no_token_to_chance() -> None:
    """A tokenizer's file may ask for it. Every preparation of a text would then give other tokens."""
    plain = train_tokenizer(sentences(300), 400)
    content = json.loads(plain.json)
    content["model"]["dropout"] = 0.5
    texts = sentences(50, seed=1)
    dropping = Tokenizer(json.dumps(content), "with dropout")
    assert dropping.encode_batch(texts) == plain.encode_batch(texts)
    assert (plain.dropout, dropping.dropout, dropping.without_dropout().dropout) == (None, 0.5, None)


def test_a_special_token_written_in_the_text_stays_text() -> None:
    tokenizer = train_tokenizer(sentences(50), 300)
    (ids,) = tokenizer.encode_batch(["before <|endoftext|> after"])
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "before <|endoftext|> after"


def test_json_xz_and_directory_give_the_same_tokenizer(tmp_path: Path) -> None:
    plain = write_tokenizer(tmp_path / "tokenizer.json")
    packed = tmp_path / "packed.json.xz"
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    assert len({load_tokenizer(str(path)).hash for path in (plain, packed, tmp_path)}) == 1


def test_the_directory_s_settings_name_the_end_token(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "!"}}))
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.eos_token, tokenizer.eos_id) == ("!", vocabulary["!"])


def test_truncation_and_padding_in_the_file_are_not_applied(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(path.read_text())
    (full,) = load_tokenizer(str(path)).encode_batch(["a long text " * 20])
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    assert load_tokenizer(str(path)).encode_batch(["a long text " * 20]) == [full]


def test_gaps_in_the_ids_count_towards_the_vocabulary(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(path.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 999, "content": "<far>"})
    content["model"]["vocab"]["<far>"] = 999
    path.write_text(json.dumps(content))
    assert load_tokenizer(str(path)).vocab_size == 1000


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": {"type": "none"}}', b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.json"):
        load_tokenizer(str(path))


def test_a_truncated_xz_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.json.xz"
    path.write_bytes(lzma.compress(write_tokenizer(tmp_path / "t.json").read_bytes())[:-100])
    with pytest.raises(DataError, match=r"cut\.json\.xz"):
        load_tokenizer(str(path))


def test_a_missing_file_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer("no/such/tokenizer.json")


def test_too_little_text_for_the_vocabulary_names_the_largest_that_works() -> None:
    with pytest.raises(DataError, match="too small") as raised:
        train_tokenizer(["abc"], 5000)
    largest = int(raised.value.remedy.split("at most ")[1].split(",")[0])
    assert train_tokenizer(["abc"], largest).vocab_size == largest


@pytest.mark.parametrize(
    ("file", "vocab_size", "eos_id"),
    [
        ("mistral-v1-32000", 32_000, 2),
        ("tekken-131072", 131_072, None),  # its file lacks the first thousand, special, ids
        ("own-bpe-wikibooks-262144", 262_144, 0),
    ],
)
def test_published_tokenizers_keep_text_whole(file: str, vocab_size: int, eos_id: int | None) -> None:
    tokenizer = load_tokenizer(str(shared_data() / "tokenizers" / f"{file}.tokenizer.json.xz"))
    texts = sentences(20)
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (vocab_size, eos_id)

"""Data sets of the Hugging Face hub, read from a local directory through `datasets`."""

import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from data_helpers import hub_config, sentences, shared_data, write_tokenizer

from linrnn.config import load_config
from linrnn.core.errors import DataError
from linrnn.data import prepare
from linrnn.data.tokenizer import load_tokenizer

HEADING = load_config(["data=wikitext103"]).data.document_start
README = """---
configs:
- config_name: small
  data_files:
  - {split: train, path: "small/train-*"}
  - {split: validation, path: "small/validation-*"}
---
"""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer.json")


def hub_directory(path: Path, **splits: list[str]) -> Path:
    (path / "small").mkdir(parents=True)
    (path / "README.md").write_text(README)
    for split, rows in splits.items():
        for part, half in enumerate((rows[: len(rows) // 2], rows[len(rows) // 2 :])):
            table = pyarrow.table({"text": half, "n": list(range(len(half)))})
            pyarrow.parquet.write_table(table, path / "small" / f"{split}-{part:05d}-of-00002.parquet")
    return path


def test_rows_are_documents_and_the_splits_are_the_named_ones(tmp_path, tokenizer):
    train, valid = sentences(60), sentences(20, seed=1)
    path = hub_directory(tmp_path / "set", train=train, validation=valid)
    data = prepare(hub_config(tmp_path / "cache", path, subset="small", tokenizer=tokenizer))
    assert (data.train.n_documents, data.valid.n_documents) == (60, 20)
    assert data.train.n_bytes == len("".join(train).encode())
    assert data.valid.n_bytes == len("".join(valid).encode())


def test_without_a_validation_split_rows_are_held_out_and_max_tokens_stops_the_stream(tmp_path, tokenizer):
    path = hub_directory(tmp_path / "set", train=sentences(600), validation=["x", "y"])
    config = hub_config(
        tmp_path / "cache", path, subset="small", valid_split=None, tokenizer=tokenizer, max_tokens=2000
    )
    data = prepare(config)
    assert 2000 <= data.train.n_tokens < 2200
    assert data.valid.n_documents == -(-(data.train.n_documents + data.valid.n_documents) // 10)


def test_wikitext_rows_are_joined_to_articles(tmp_path, tokenizer):
    rows = ["", " = One = \n", "", " text = a \n", " = = Part = = \n", "more\n", " = Two = \n", "", "end\n"]
    path = hub_directory(tmp_path / "set", train=rows, validation=rows)
    config = hub_config(
        tmp_path / "cache", path, subset="small", tokenizer=tokenizer, document_start=HEADING, empty_row=" \n"
    )
    data = prepare(config)
    ends = data.train.document_ends
    decode = load_tokenizer(str(tokenizer)).decode
    texts = [
        decode(data.train.read(start, stop - 1).tolist()) for start, stop in zip([0, *ends[:-1]], ends, strict=True)
    ]
    assert texts == [" \n = One = \n \n text = a \n = = Part = = \nmore\n", " = Two = \n \nend\n"]


@pytest.mark.parametrize(
    ("changes", "cause", "remedy"),
    [
        ({"train_split": "training"}, "no split 'training'", "train_split"),
        ({"text_field": "body"}, "no field 'body'", "text, n"),
        ({"subset": "large"}, "(large) cannot be read", "data.subset"),
    ],
)
def test_what_the_data_set_lacks_is_named(tmp_path, tokenizer, changes, cause, remedy):
    path = hub_directory(tmp_path / "set", train=["a", "b"], validation=["c", "d"])
    with pytest.raises(DataError, match=re.escape(cause)) as raised:
        prepare(hub_config(tmp_path / "cache", path, **{"subset": "small", "tokenizer": tokenizer, **changes}))
    assert remedy in raised.value.remedy


def test_the_shared_copy_of_wikitext_has_the_official_bytes_and_articles(tmp_path, tokenizer):
    overrides = ["data=wikitext103", f"data.path={shared_data() / 'wikitext-103'}", f"data.cache_dir={tmp_path}"]
    overrides.append(f"data.tokenizer={tokenizer}")
    data = prepare(load_config([*overrides, "data.train_split=test"]).data)
    assert (data.valid.n_bytes, data.valid.n_documents) == (1_146_846, 60)
    with pytest.raises(DataError, match="no split 'train', only: validation, test"):
        prepare(load_config(overrides).data)

"""Local files: every format gives the same documents. The error for a bad file names the line and a remedy."""

import gzip
import lzma
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from data_helpers import sentences, write_jsonl

from linrnn.core.errors import DataError
from linrnn.data import readers
from linrnn.data.readers import BLANK_LINE, find_files, read_documents

PARTS = ["\n \n one\ntwo\n\n\n", "three\r\n\t\r\n", "four\n\n", "five"]


def texts_of(path: Path, separator: str | None = None) -> list[str]:
    return list(read_documents([path], "text", separator))


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "A.JSON.XZ", "a.parquet"])
def test_rows_give_every_text_in_order(tmp_path, name):
    expected, path = sentences(100), tmp_path / name
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": expected, "n": list(range(100))}), path)
    else:
        write_jsonl(path, expected)
    if name.endswith("XZ"):
        path.write_bytes(lzma.compress(path.read_bytes()))
    assert list(read_documents([path], "text")) == expected


@pytest.mark.parametrize(
    ("text", "separator", "documents"),
    [
        ("".join(PARTS), None, ["".join(PARTS)]),
        ("".join(PARTS), BLANK_LINE, PARTS),
        ("\ufefftext", None, ["text"]),
        ("one<|endoftext|>two<|endoftext|>", "<|endoftext|>", ["one", "two"]),
        ("one\n---\ntwo\n---\n\n---\nthree", "\n---\n", ["one", "two", "three"]),
        ("one\n\ntwo\n\n\nthree", "\n\n", ["one", "two", "\nthree"]),
        ("one.*two", ".*", ["one", "two"]),
        ("a" * 50 + "aab" + "aaab", "aab", ["a" * 50, "a"]),
        ("one\r\ntwo", "\r\n", ["one", "two"]),
    ],
)
def test_a_text_file_is_one_document_or_a_separator_ends_one(text, separator, documents, tmp_path):
    assert texts_of(written(tmp_path / "a.md", text), separator) == documents


@pytest.mark.parametrize("text", ["line\n" * 50, "word " * 60, "x" * 333, "short\n" + "y" * 400 + "\n"])
@pytest.mark.parametrize("separator", [None, BLANK_LINE, "|"])
def test_a_long_document_is_cut_and_no_character_is_lost(text, separator, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST", 100)
    found = texts_of(written(tmp_path / "a.txt", text), separator)
    assert "".join(found).rstrip() == text.rstrip()
    assert all(len(document) <= 100 for document in found)
    if text.startswith("line"):
        assert all(document.endswith("\n") for document in found)


@pytest.mark.parametrize(
    ("line", "cause", "remedy"),
    [
        ('{"text": "open', "line 2: not JSON", "jq"),
        ("[" * 100_000, "line 2: not JSON", "jq"),
        ('{"body": "x"}', "line 2 has no field 'text'", "body"),
        ('{"text": 5}', "line 2: text is of type int, not text", "data.text_field"),
        ('{"text": "\\ud800"}', "line 2: text has half of a surrogate pair", "correct"),
        ("naïve".encode("latin-1"), "line 2: not UTF-8", "UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, cause, remedy):
    content = b'{"text": "fine"}\n' + (line.encode() if isinstance(line, str) else line) + b"\n"
    with pytest.raises(DataError, match=r"a\.jsonl") as error:
        texts_of(written(tmp_path / "a.jsonl", content))
    assert cause in error.value.cause
    assert remedy in error.value.remedy


def test_a_parquet_file_without_the_column_or_its_end_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": sentences(100)}), path)
    with pytest.raises(DataError, match=r"(?s)no field 'text'.*body"):
        texts_of(path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"a\.parquet is not an intact parquet file"):
        texts_of(path)


def make(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f'{{"text": "{name}"}}\n')


def found_in(root: Path, *paths: str) -> list[str]:
    files = find_files([f"{root}/{path}" for path in paths], "data.path")
    return [file.relative_to(root).as_posix() for file in files]


def test_a_directory_gives_its_data_files_sorted(tmp_path):
    rows = ["F.JSONL", "a.jsonl", "b.txt", "h.jsonl.bz2", "i.ndjson", "j.jsonl.GZ", "k.TXT"]
    rows += ["sub/c.txt.xz", "sub/g.Parquet"]
    make(tmp_path, *reversed(rows), ".hidden/d.txt", "sub/.e.jsonl", "sub/.f", "README.md", "x.json")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    assert found_in(tmp_path, "") == rows
    assert found_in(tmp_path, "**/*.txt*") == ["b.txt", "k.TXT", "sub/c.txt.xz"][::2]


def test_a_directory_of_text_files_gives_all_of_them(tmp_path):
    make(tmp_path, "a.md", "b.py", "sub/c.rst", "LICENSE", "d.md.gz")
    (tmp_path / "d.md.gz").write_bytes(gzip.compress(b"text"))
    (tmp_path / "e.tar.gz").write_bytes(gzip.compress(b"a\0b"))
    (tmp_path / "f.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "h.md").write_bytes(b"x" * 4095 + "é".encode() * 9)  # a character at the end of what is looked at
    (tmp_path / "sub/__init__.py").touch()
    assert found_in(tmp_path, "") == ["LICENSE", "a.md", "b.py", "d.md.gz", "h.md", "sub/c.rst"]


def test_folders_and_files_behind_links_are_read_once(tmp_path):
    make(tmp_path, "data/a.jsonl", "data/deep/b.jsonl", "disk2/c.jsonl", "disk3/d.jsonl")
    links = {"part2": "../disk2", "again": "../disk2", "loop": ".", "deep/up": "..", "deep/self": "self"}
    links |= {"e.jsonl": "../disk3/d.jsonl", "f.jsonl": "a.jsonl", "deep/other": "../loop"}
    for name, target in links.items():
        (tmp_path / "data" / name).symlink_to(target)
    files = ["data/a.jsonl", "data/again/c.jsonl", "data/deep/b.jsonl", "data/e.jsonl"]
    assert found_in(tmp_path, "data") == files
    for loop in ("loop", "deep/up", "deep/other"):
        (tmp_path / "data" / loop).unlink()
    assert len(found_in(tmp_path, "data/**/*.jsonl")) == 4


@pytest.mark.parametrize(
    ("paths", "files"),
    [
        (["part*"], ["part1/a.jsonl", "part2/b.jsonl", "part2/sub/c.jsonl"]),
        (["*"], ["d.jsonl", "part1/a.jsonl", "part2/b.jsonl", "part2/sub/c.jsonl"]),
        (["part2/", "d.jsonl"], ["part2/b.jsonl", "part2/sub/c.jsonl", "d.jsonl"]),
        (["d.jsonl", "d.jsonl", "*.jsonl"], ["d.jsonl"]),
        (["part1/../d.jsonl"], ["part1/../d.jsonl"]),
        (["part2/n.json"], ["part2/n.json"]),
    ],
)
def test_several_paths_globs_of_folders_and_slashes(paths, files, tmp_path):
    make(tmp_path, "part1/a.jsonl", "part2/b.jsonl", "part2/sub/c.jsonl", "d.jsonl", "part2/n.json")
    (tmp_path / "z.png").write_bytes(b"\x89PNG")
    assert found_in(tmp_path, *paths) == files


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make(tmp_path, "a.jsonl")
    assert find_files("~/*.jsonl", "data.path") == find_files(["~"], "data.path") == [tmp_path / "a.jsonl"]


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("missing.txt", "does not exist"),
        ("x" * 300, "does not exist"),
        ("empty.txt", "is empty"),
        ("pipe.txt", "no file that can be read twice"),
        ("folder", "holds no data files"),
        ("folder/*.json", r"does not exist"),
    ],
)
def test_what_cannot_be_data_is_refused(tmp_path, path, cause):
    (tmp_path / "empty.txt").touch()
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/notes.bin").write_bytes(b"\0")
    with pytest.raises(DataError, match=cause):
        find_files(str(tmp_path / path), "data.path")

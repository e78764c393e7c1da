"""A compressed file gives all its documents, or an error that says why not. It never gives some of them."""

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from data_helpers import write_tokenizer

from linrnn.core.errors import DataError
from linrnn.data.readers import read_documents
from linrnn.data.tokenizer import load_tokenizer

Pack = Callable[[bytes], bytes]
PACKERS: dict[str, Pack] = {
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
SUFFIXES = pytest.mark.parametrize("suffix", PACKERS)
SKIPPED = b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"  # a frame of zstd without content


def lines(name: str, count: int = 5) -> bytes:
    return "".join(json.dumps({"text": f"{name}{i}"}) + "\n" for i in range(count)).encode()


def texts_in(tmp_path: Path, suffix: str, content: bytes) -> list[str]:
    path = tmp_path / f"d.jsonl{suffix}"
    path.write_bytes(content)
    return list(read_documents([path], "text"))


BOTH = [f"{name}{i}" for name in "ab" for i in range(5)]
A, B = lines("a"), lines("b")


@SUFFIXES
@pytest.mark.parametrize(
    "build",
    [
        lambda pack: pack(A + B),
        lambda pack: pack(A) + pack(B),
        lambda pack: pack(b"") + pack(A) + pack(b"") + pack(B) + pack(b""),
        lambda pack: pack(A) + bytes(512) + pack(B) + bytes(1000),
        lambda pack: b"".join(pack((A + B)[i : i + 7]) for i in range(0, len(A + B), 7)),
    ],
    ids=["one", "two", "empty ones", "padded", "documents across streams"],
)
def test_every_stream_is_read(suffix, build, tmp_path, monkeypatch):
    content = build(PACKERS[suffix])
    for chunk in (1 << 16, len(PACKERS[suffix](A)), 5, 1):
        monkeypatch.setattr("linrnn.data.readers.CHUNK", chunk)
        assert texts_in(tmp_path, suffix, content) == BOTH, chunk


@SUFFIXES
@pytest.mark.parametrize(
    "damage",
    [
        lambda a, b: a + b"X" + b[1:],
        lambda a, b: a + b"rubbish, no stream",
        lambda a, b: a + b"\x00\x00\x00\x00rubbish",
        lambda a, b: a + b[:-1],
        lambda a, b: a + b[: len(b) // 2],
        lambda a, b: a[:-1],
        lambda a, b: a + b[:-6] + bytes([b[-6] ^ 1]) + b[-5:],
        lambda a, b: a + b[: len(b) // 2] + bytes([b[len(b) // 2] ^ 1]) + b[len(b) // 2 + 1 :],
        lambda a, b: lines("a"),
    ],
)
def test_what_is_damaged_is_never_read_in_part(suffix, damage, tmp_path):
    a, b = (PACKERS[suffix](lines(name, 200)) for name in "ab")
    with pytest.raises(DataError, match=rf"d\.jsonl{suffix} is corrupt or cut short"):
        texts_in(tmp_path, suffix, damage(a, b))


def test_long_windows_and_skipped_frames_of_zstd_are_read(tmp_path):
    long = zstandard.ZstdCompressionParameters(window_log=31, write_content_size=False, enable_ldm=True)
    out = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=long).stream_writer(out, closefd=False) as writer:
        writer.write(A)
    assert texts_in(tmp_path, ".zst", SKIPPED + out.getvalue() + SKIPPED + PACKERS[".zst"](B) + SKIPPED) == BOTH


@SUFFIXES
def test_a_compressed_file_without_its_ending_is_refused_with_the_way_out(suffix, tmp_path):
    with pytest.raises(DataError, match="not UTF-8") as error:
        texts_in(tmp_path, "", PACKERS[suffix](A))
    assert suffix in error.value.remedy


@SUFFIXES
def test_a_tokenizer_s_file_is_read_whole_or_refused(suffix, tmp_path):
    content = write_tokenizer(tmp_path / "plain.json").read_bytes()
    halves = [PACKERS[suffix](half) for half in (content[:1000], content[1000:])]
    path = tmp_path / f"tokenizer.json{suffix}"
    path.write_bytes(b"".join(halves))
    assert load_tokenizer(str(path)).hash == load_tokenizer(str(tmp_path / "plain.json")).hash
    for damaged in (halves[0] + halves[1][:-5], b"".join(halves) + b"rubbish", PACKERS[suffix](content) + b"X"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"tokenizer\.json{suffix} cannot be read"):
            load_tokenizer(str(path))

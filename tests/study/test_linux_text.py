"""The text of the long pretraining runs: one JSON object a file, or a line that says what is missing."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "study" / "linux_text.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_each_file_of_c_with_text_is_a_line(tmp_path):
    for name, text in {"a.c": "int a;", "b.h": "int b;", "empty.c": " ", "c.txt": "no"}.items():
        (tmp_path / name).write_text(text)
    assert run(tmp_path, tmp_path / "out.jsonl").returncode == 0
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["text"] for line in lines) == ["int a;", "int b;"]

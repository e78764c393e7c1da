"""Builds this package as a repository of Hugging Face's `kernels` library: `python kernels/hub/build.py FOLDER`.

Triton and torch compile at run time, so one variant serves all devices. The functions of cce_kernels are the kernel's
functions; its layers stand in layers.py.
"""

import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
METADATA = {
    "id": "_cce_kernels_1", "name": "cce-kernels", "version": 1, "license": "Apache-2.0", "python-depends": [],
    "backend": {"type": "cuda"},
}  # fmt: skip


def build(folder: Path) -> Path:
    """Write the repository into a folder that does not exist yet, and return the folder."""
    variant = folder / "build" / "torch-universal"
    shutil.copytree(HERE.parent / "cce_kernels", variant, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "layers.py", variant)
    shutil.copy(HERE.parent / "README.md", folder)
    with open(variant / "__init__.py", "a", encoding="utf-8") as package:
        package.write("\nfrom . import layers  # noqa: E402, F401\n")
    (variant / "metadata.json").write_text(json.dumps(METADATA, indent=2), encoding="utf-8")
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python kernels/hub/build.py FOLDER, which does not exist yet")
    print(build(Path(sys.argv[1])))

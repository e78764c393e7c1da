"""Half a gigabyte of C without a hub: the .c and .h files of Debian's linux-source-6.1, one JSON object a line.

    apt-get download linux-source-6.1 && dpkg-deb -x linux-source-6.1_*.deb . && tar xf usr/src/linux-source-6.1.tar.xz
    python study/linux_text.py linux-source-6.1 linux.jsonl

Left out are links, and the register tables of drivers/gpu/drm/amd/include. Files stand in the order of their paths'
md5, which mixes the kernel's parts.
"""

import hashlib
import json
import sys
from pathlib import Path


def main(root: Path, output: Path) -> None:
    paths = (path for path in root.rglob("*.[ch]") if path.is_file() and not path.is_symlink())
    names = [path.relative_to(root).as_posix() for path in paths]
    names = [name for name in names if not name.startswith("drivers/gpu/drm/amd/include/")]
    if not names:
        sys.exit(f"error: {root} holds no .c or .h files\n  -> name the folder that tar wrote")
    with output.open("w", encoding="utf-8") as file:
        for name in sorted(names, key=lambda name: hashlib.md5(name.encode()).hexdigest()):
            text = (root / name).read_text(encoding="utf-8", errors="replace")
            if text.strip():
                file.write(json.dumps({"text": text}) + "\n")
    print(f"wrote {len(names):,} files to {output}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("error: two paths are needed\n  -> python study/linux_text.py linux-source-6.1 linux.jsonl")
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Execute the notebooks on the committed results and store them: `python scripts/maintain/execute_notebooks.py`."""

import sys
import tempfile
from pathlib import Path

from linrnn.config import CONFIG_DIR

sys.path.insert(0, str(CONFIG_DIR.parent))  # study/ is in no wheel


def main() -> None:
    import nbformat

    from study.notebook import FOLDERS, execute

    root = CONFIG_DIR.parent
    with tempfile.TemporaryDirectory() as directory:
        for name in FOLDERS:  # leaves out runs made on this machine
            (Path(directory) / name).symlink_to(root / "results" / name)
        for path in sorted((root / "notebooks").glob("*.ipynb")):
            notebook = nbformat.read(path, as_version=4)
            execute(notebook, Path(directory))
            nbformat.write(notebook, path)
            print(f"wrote {path.relative_to(root)}")


if __name__ == "__main__":
    main()

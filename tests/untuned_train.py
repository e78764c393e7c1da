"""`train.py` as torchrun starts it on GPUs, without tuning FLA's kernels for minutes."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from rank_process import leave_kernels_untuned

    leave_kernels_untuned()
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "train.py"), run_name="__main__")

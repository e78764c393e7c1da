"""What the runs show: results, intervals, verdicts, plots and reports."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3]))  # benchmarks/, whose rows the study judges, is not installed

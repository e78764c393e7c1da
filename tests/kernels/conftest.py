"""Puts this folder on the import path, for cases.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

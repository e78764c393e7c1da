"""Measure where a step's memory and time go: `python scripts/breakdown.py model=gla size=1b3 loss=cce_kahan`."""

from linrnn.commands import start

if __name__ == "__main__":
    start("breakdown")

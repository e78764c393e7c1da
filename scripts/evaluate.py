"""Compute a checkpoint's loss, perplexity and bits per byte: `python scripts/evaluate.py checkpoint=results/…`."""

from linrnn.commands import start

if __name__ == "__main__":
    start("evaluate")

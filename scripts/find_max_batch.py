"""Find the largest batch for a memory budget: `python scripts/find_max_batch.py model=gla size=1b3 loss=cce_kahan`."""

from linrnn.commands import start

if __name__ == "__main__":
    start("find_max_batch")

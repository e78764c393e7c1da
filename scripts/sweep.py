"""Run many runs, each in its own process, and skip finished ones: `python scripts/sweep.py sweep=mve`."""

from linrnn.commands import start

if __name__ == "__main__":
    start("sweep")

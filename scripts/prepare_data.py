"""Tokenise data once, or check prepared data: `python scripts/prepare_data.py data=text data.path=…`."""

from linrnn.commands import start

if __name__ == "__main__":
    start("prepare_data")

"""Generate text from a model: `python scripts/generate.py checkpoint=results/… prompt="Once upon a time"`."""

from linrnn.commands import start

if __name__ == "__main__":
    start("generate")

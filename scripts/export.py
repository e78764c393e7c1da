"""Export a model as a Hugging Face directory: `python scripts/export.py checkpoint=results/… output=my_model`."""

from linrnn.commands import start

if __name__ == "__main__":
    start("export")

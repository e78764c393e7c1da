"""Train one model with one loss backend: `python train.py model=gla loss=cce_kahan size=mve data=stdlib`."""

from linrnn.commands import start

if __name__ == "__main__":
    start("train")

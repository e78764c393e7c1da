"""Tune FLA's kernels for this GPU and store the choices: `python scripts/tune.py models=[gla] sizes=[350m]`."""

from linrnn.commands import start

if __name__ == "__main__":
    start("tune")

"""Print what can run on this machine, what cannot, why, and what to install: `python scripts/doctor.py`."""

from linrnn.commands import start

if __name__ == "__main__":
    start("doctor")

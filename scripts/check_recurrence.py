"""Compare FLA's recurrence with plain torch on this GPU: `python scripts/check_recurrence.py model=kda size=1b3`."""

from linrnn.commands import start

if __name__ == "__main__":
    start("check_recurrence")

"""List the runs of a group, and compare two: `python scripts/runs.py group=default [compare=[RUN,RUN]]`."""

from linrnn.commands import start

if __name__ == "__main__":
    start("runs")

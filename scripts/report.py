"""Write a group's report in Markdown and HTML: `python scripts/report.py group=mve`."""

from linrnn.commands import start

if __name__ == "__main__":
    start("report")

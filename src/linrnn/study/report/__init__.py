"""Reports on a group of runs: report.md, verdicts.md, plots, and report.html, a page that needs no other file.

`tables` and `remarks` make the content, `sections` orders it, `page` renders it, and `write` writes the files.
"""

from linrnn.study.report.tables import course_lines, verdict_table
from linrnn.study.report.write import make_report, write_report

__all__ = ["course_lines", "make_report", "verdict_table", "write_report"]

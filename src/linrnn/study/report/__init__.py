"""A group of runs as people read it: report.md, verdicts.md, plots, and report.html, one page that needs no other file.

`tables` and `remarks` say what a report holds, `sections` puts that in order, `page` renders it, `write` writes files.
"""

from linrnn.study.report.tables import course_lines, verdict_table
from linrnn.study.report.write import make_report, write_pages, write_report

__all__ = ["course_lines", "make_report", "verdict_table", "write_pages", "write_report"]

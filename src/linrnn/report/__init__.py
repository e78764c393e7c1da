"""Reports on a group of runs: report.md, plots, and report.html, a page that needs no other file.

`runs` reads, `verdicts` compares runs by seed, `targets` says what a comparison may be judged by, `summary`, `tables`
and `remarks` make the content, `page` renders it, and `write` orders it and writes the files.
"""

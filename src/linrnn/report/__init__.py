"""Reports on a group of runs: report.md, plots, and report.html, a page that needs no other file.

`runs` reads, `metrics` says what two losses are compared by and `targets` how that is judged, `verdicts` compares by
seed, `tables` and `plots` make the content, and `write` orders it and writes the files.
"""

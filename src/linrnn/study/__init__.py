"""What the runs show: results, intervals, verdicts, plots and reports."""

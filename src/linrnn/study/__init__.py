"""What runs say: results, intervals, verdicts, plots and reports."""

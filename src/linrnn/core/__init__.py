"""Helpers that every package uses: errors, output, files, signals, and what the machine has free."""

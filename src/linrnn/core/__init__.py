"""Helpers that every package uses: errors, output, files, locks, signals, and what the machine has free."""

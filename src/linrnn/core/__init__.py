"""What every package uses: errors, output, files, locks, signals, the machine."""

"""What a run leaves behind: its directory, metrics, summary, environment and provenance."""

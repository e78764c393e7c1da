"""What a run writes: its directory, metrics, summary, environment and provenance. And the rule of paired intervals."""

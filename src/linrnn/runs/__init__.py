"""What a run writes: its directory, metrics, summary, environment and provenance; and the rule of intervals of paired runs."""

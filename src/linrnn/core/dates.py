"""Dates for people. Durations never come from here: the clock on the wall may jump."""

from datetime import UTC, datetime


def utc_now() -> str:
    """The time of day: ISO 8601, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")

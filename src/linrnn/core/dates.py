"""Dates for people. Never compute a duration from them: the system clock may jump."""

from datetime import UTC, datetime


def utc_now() -> str:
    """The current date and time: ISO 8601, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")  # noqa: TID251

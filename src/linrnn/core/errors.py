"""Errors a user can act on: one line of cause, one line of remedy, and the exit code the command ends with."""

from typing import Any

EXIT_CODES = (
    "0 finished, 1 unexpected error (a bug), 2 wrong configuration, 3 data, 4 not supported here, 5 out of memory, "
    "6 diverged, 7 storage, 128 + signal interrupted (129 SIGHUP, 130 Ctrl-C, 131 SIGQUIT, 138 SIGUSR1, 143 SIGTERM)"
)


class LinrnnError(Exception):
    """Base of every error that is shown without a traceback.

    Args:
        cause: what is wrong, in one line, naming the offending value.
        remedy: what to do about it, in one line.
    """

    exit_code = 1

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(f"{cause}\n  -> {remedy}")
        self.cause = cause
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.cause, self.remedy)  # so that it comes whole out of another process


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an exception is an allocator's: of the GPU, of a library on it, or of the CPU; or a size is beyond all
    memory, which NumPy and PyTorch say in words of their own."""
    words = (
        "CUBLAS_STATUS_ALLOC_FAILED",
        "DefaultCPUAllocator",
        "out of memory",
        "Storage size calculation overflowed",
    )
    too_large = ("Maximum allowed dimension exceeded", "array is too big", "Maximum allowed size exceeded")
    return (
        isinstance(error, MemoryError)
        or any(kind.__module__ == "torch" and kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
        or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))
        or (isinstance(error, ValueError) and any(word in str(error) for word in too_large))
    )


class ConfigError(LinrnnError):
    """An unknown, missing or impossible configuration value."""

    exit_code = 2


class DataError(LinrnnError):
    """A data file that is missing, empty, corrupt or too small."""

    exit_code = 3


class UnsupportedError(LinrnnError):
    """Something that cannot run with this hardware or these library versions."""

    exit_code = 4


class OutOfMemoryError(LinrnnError):
    """The device (or `memory_budget_gib`) has too little memory for the step."""

    exit_code = 5


class DivergedError(LinrnnError):
    """The loss or the gradient norm is no longer finite."""

    exit_code = 6


class StorageError(LinrnnError):
    """A file could not be written: disk full, no permission, read-only."""

    exit_code = 7


class InterruptedRun(LinrnnError):
    """A signal stopped the run after its current step; exit code 128 + signal (130 for Ctrl-C)."""

    def __init__(self, cause: str, remedy: str, signal_number: int) -> None:
        super().__init__(cause, remedy)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.cause, self.remedy, self.signal_number)


class RankFailedError(LinrnnError):
    """Another process of a distributed run has failed; the exit code is that one's."""

    def __init__(self, cause: str, remedy: str, exit_code: int = 1) -> None:
        super().__init__(cause, remedy)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.cause, self.remedy, self.exit_code)


class SweepFailure(LinrnnError):
    """Points of a sweep failed; the exit code is theirs if they agree, else 1."""

    def __init__(self, cause: str, remedy: str, exit_code: int) -> None:
        super().__init__(cause, remedy)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.cause, self.remedy, self.exit_code)

"""Errors that a user can act on. Each has one line of cause, one line of remedy, and an exit code for the command."""

from typing import Any

from linrnn.core.machine import gpu_is_shared

EXIT_CODES = (
    "0 finished, 1 any other error (a bug, an illegal memory access, a killed rank, a shared GPU that was full), "
    "2 wrong configuration, 3 data, 4 not supported here, 5 out of memory, 6 diverged, 7 storage, "
    "8 runs that the command started failed, "
    "128 + signal interrupted (129 SIGHUP, 130 Ctrl-C, 131 SIGQUIT, 138 SIGUSR1, 143 SIGTERM)"
)


class LinrnnError(Exception):
    """Base of every error that is shown without a traceback.

    Args:
        cause: what is wrong, in one line. It names the offending value.
        remedy: what to do about it, in one line.
        exit_code: of the command; None for that of the class.
    """

    exit_code = 1

    def __init__(self, cause: str, remedy: str, exit_code: int | None = None) -> None:
        super().__init__(f"{cause}\n  -> {remedy}")
        self.cause = cause
        self.remedy = remedy
        if exit_code is not None:
            self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.cause, self.remedy, self.exit_code)  # pickle keeps all when another process raised it


def first_line(error: BaseException) -> str:
    """Of the error's message; the name of its class where that is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def described(error: BaseException) -> str:
    """The error's class and the first line of its message, if it has one."""
    kind, first = type(error).__name__, first_line(error)
    return kind if first == kind else f"{kind}: {first}"


def as_reason(error: BaseException) -> str:
    """What a benchmark's row says of an error, in one line of at most 150 characters."""
    reason = error.cause if isinstance(error, LinrnnError) else described(error)
    return reason.strip().splitlines()[0][:150]  # where memory ran out, PyTorch goes on for 500 about this process


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out.

    It may come from the allocator of the GPU, of the CPU, or of a library on the GPU. NumPy and PyTorch have other
    words for a size beyond any memory; those count too.
    """
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


def accessed_illegally(error: BaseException) -> bool:
    """Whether a GPU kernel accessed memory that is not its own. CUDA reports that at a later call."""
    return "illegal memory access" in str(error)


class ConfigError(LinrnnError):
    """An unknown, missing or impossible configuration value."""

    exit_code = 2


class DataError(LinrnnError):
    """A data file that is missing, empty, corrupt or too small."""

    exit_code = 3


class UnsupportedError(LinrnnError):
    """This hardware or these library versions cannot run what was asked for."""

    exit_code = 4


class OutOfMemoryError(LinrnnError):
    """The device (or `memory_budget_gib`) has too little memory for the step."""

    exit_code = 5


class SharedGpuFullError(LinrnnError):
    """Memory ran out on a GPU that other runs filled as well. This says nothing about the run's own needs."""


def out_of_memory(cause: str, remedy: str) -> OutOfMemoryError | SharedGpuFullError:
    """The error for memory that ran out: an answer about the run, unless other runs share its GPU."""
    if gpu_is_shared():
        return SharedGpuFullError(
            f"{cause} (other runs share this GPU, so this is no answer about the run)",
            "lower jobs and run the same sweep again, or leave share_gpus out",
        )
    return OutOfMemoryError(cause, remedy)


class DivergedError(LinrnnError):
    """The loss or the gradient norm is no longer finite."""

    exit_code = 6


class StorageError(LinrnnError):
    """A file could not be written: disk full, no permission, read-only."""

    exit_code = 7


class InterruptedRun(LinrnnError):
    """A signal stopped the run after its current step; exit code 128 + signal (130 for Ctrl-C)."""

    def __init__(self, cause: str, remedy: str, signal_number: int) -> None:
        super().__init__(cause, remedy, 128 + signal_number)
        self.signal_number = signal_number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.cause, self.remedy, self.signal_number)


class RankFailedError(LinrnnError):
    """Another process of a distributed run failed. The exit code is that process's."""


class SweepFailure(LinrnnError):
    """Points of a sweep, or a probe of a search, failed.

    The exit code is that of the points if all diverged.
    """

    exit_code = 8

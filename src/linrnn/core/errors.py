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
        return type(self).__new__, (type(self), *self.args), self.__dict__  # pickled when another process raised it


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


class DivergedError(LinrnnError):
    """The loss or the gradient norm is no longer finite."""

    exit_code = 6


class StorageError(LinrnnError):
    """A file could not be written: disk full, no permission, read-only."""

    exit_code = 7


class SweepFailure(LinrnnError):
    """Points of a sweep, or a probe of a search, failed. The exit code is that of the points if all diverged."""

    exit_code = 8


class InterruptedRun(LinrnnError):
    """A signal stopped the run after its current step. The exit code is 128 + the signal's number."""

    def __init__(self, cause: str, remedy: str, signal_number: int) -> None:
        super().__init__(cause, remedy, 128 + signal_number)


class RankFailedError(LinrnnError):
    """Another process of a distributed run failed. The exit code is that process's."""


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


OUT_OF_MEMORY = {
    RuntimeError: ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator", "size calculation overflowed"),
    ValueError: ("Maximum allowed dimension exceeded", "array is too big", "Maximum allowed size exceeded"),  # NumPy's
    MemoryError: ("",),
}


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of Python, NumPy or PyTorch says that memory ran out, or that no memory is so large."""
    words = next((words for kind, words in OUT_OF_MEMORY.items() if isinstance(error, kind)), ())
    said = f"{type(error)} {error}"  # torch.OutOfMemoryError says enough by its name
    return "torch.OutOfMemoryError" in said or any(word in said for word in words)


def out_of_memory(cause: str, remedy: str) -> OutOfMemoryError | SharedGpuFullError:
    """The error for memory that ran out: an answer about the run, unless other runs share its GPU."""
    if not gpu_is_shared():
        return OutOfMemoryError(cause, remedy)
    cause += " (other runs share this GPU, so this is no answer about the run)"
    return SharedGpuFullError(cause, "lower jobs and run the same sweep again, or leave share_gpus out")


def accessed_illegally(error: BaseException) -> bool:
    """Whether a GPU kernel accessed memory that is not its own. CUDA reports that at a later call."""
    return "illegal memory access" in str(error)

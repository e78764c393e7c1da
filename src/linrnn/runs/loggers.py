"""Where a run's figures go: metrics.jsonl (always), wandb and TensorBoard (mirrors), console and train.log."""

import contextlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from linrnn.config.schema import LoggerConfig, WandbConfig
from linrnn.core.dates import utc_now
from linrnn.core.errors import UnsupportedError, described
from linrnn.core.files import write_text
from linrnn.core.output import say
from linrnn.core.redaction import scrub
from linrnn.core.requirements import require_package

CONNECTION_SECONDS = 60  # how long a run waits for wandb's server at its start, and again at its end
MOVES_SECONDS = 0.2  # between the places of the line that moves on a terminal
_SERVICE_SECONDS = 120  # wandb's own process may take so long to start: 30 are too short on a busy machine


def has_wandb_key() -> bool:
    """Whether wandb finds an API key (environment or netrc). Neither asks the user nor goes online."""
    import wandb

    wandb.setup(wandb.Settings(silent=True, x_service_wait=_SERVICE_SECONDS))
    return bool(wandb.login(prompt=False, verify=False))


def check_loggers(config: LoggerConfig) -> None:
    """Raise if a logger cannot serve here.

    Raises:
        UnsupportedError: TensorBoard is not installed, or wandb's `mode=online` finds no API key.
    """
    if config.wandb.mode == "online" and not has_wandb_key():
        raise UnsupportedError(
            "logger.wandb.mode=online: wandb has no API key",
            "run `wandb login` or set WANDB_API_KEY, or use logger.wandb.mode=offline and sync later",
        )
    if config.tensorboard:
        require_package("tensorboard", "tensorboard", "logger.tensorboard=true", "linrnn[tensorboard]")


class TensorboardMirror:
    """Mirrors metrics to event files. A resumed run replaces what an earlier process wrote after `step`.

    A failure is reported and does not stop a run.
    """

    def __init__(self, directory: Path, step: int, say: Callable[[str], None]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)
        self._say = say
        say(f"TensorBoard: tensorboard --logdir {directory.parent}")

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Mirror the metrics of a step."""
        try:
            for name, value in _measured(metrics).items() if self._writer else ():
                self._writer.add_scalar(name, value, step)
        except Exception as error:
            self._say(f"TensorBoard stopped ({described(error)}); metrics.jsonl goes on")
            self._writer = None

    def finish(self) -> None:
        """Write what is left."""
        with contextlib.suppress(Exception):
            if self._writer:
                self._writer.close()


class Console:
    """Prints lines for people on standard output, and with the date in train.log; without a log it is silent.

    On a terminal one progress line moves in place. Elsewhere progress lines come at most every `every_seconds`. If the
    log cannot be written, one message says so and the run goes on without it. A closed standard output does not stop a
    run either.
    """

    def __init__(self, log_path: Path | None = None, every_seconds: float = 0.0) -> None:
        self._silent = log_path is None  # on every rank but the first
        self._log: TextIO | None = log_path.open("a", encoding="utf-8") if log_path else None
        self._moves = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._every = MOVES_SECONDS if self._moves else every_seconds
        self._moving = ""  # the line that stands on the terminal, without its end
        self._last = float("-inf")

    def line(self, text: str = "") -> None:
        """Print a line for people."""
        if self._silent:
            return
        text = scrub(text)
        say(f"\r{text.ljust(len(self._moving))}" if self._moving else text)
        self._record(text)
        if self._moving:
            say(self._moving, end="")

    def progress(self, step: int, total: int, text: str) -> None:
        """A progress line: always in train.log; on the console if it is due or the last step's."""
        if self._silent:
            return
        now, plain = time.monotonic(), f"step {step:>{len(str(total))}}/{total} | {text}"
        self._record(plain)
        if step < total and now - self._last < self._every:
            return
        self._last = now
        if not self._moves:
            say(plain)
            return
        from tqdm import tqdm

        form = "{percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} | " + text
        room = shutil.get_terminal_size().columns - 1
        self._moving = tqdm.format_meter(step, total, elapsed=0, ncols=room, bar_format=form)[:room].ljust(room)
        say(f"\r{self._moving}", end="")

    def end_progress(self) -> None:
        """Leave the line that moves."""
        if self._moving:
            say("")
        self._moving = ""

    def _record(self, text: str) -> None:
        try:
            if self._log is not None:
                print(f"{utc_now()}  {text}" if text else "", file=self._log, flush=True)
        except OSError as error:
            say(f"{self._log and self._log.name} is given up ({error.strerror})")
            self.close()

    def close(self) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):  # the text that could not be written before still cannot
                self._log.close()
            self._log = None


class WandbMirror:
    """Mirrors metrics to wandb. A failure there is reported and never stops a run.

    Without a connection at the start, the run is recorded offline. Offline records, and records not sent by the end,
    stay in `<directory>/wandb` for `wandb sync`. If wandb's own process dies, the whole run is recorded again from
    `history` at the end.

    Args:
        config: mode, project, entity and tags.
        directory: the run directory. Its file `wandb_id` keeps the run's id, so that a resumed run continues it.
        history: returns every record of metrics.jsonl, each with its `step`.
        say: prints one line for the user.
        tags: in addition to those of `config`.
        about: what else wandb.init shall know: the run's name, group and config.
    """

    def __init__(
        self,
        config: WandbConfig,
        directory: Path,
        /,
        *,
        history: Callable[[], list[dict[str, Any]]],
        say: Callable[[str], None],
        tags: list[str],
        **about: Any,
    ) -> None:
        self._run: Any = None
        self._lost = False  # wandb failed in the middle of the run
        self._history, self._say, self._directory = history, say, directory
        self._options: dict[str, Any] = {**about, "project": config.project, "entity": config.entity}
        self._options |= {"tags": [*dict.fromkeys((*tags, *config.tags))], "dir": str(directory)}
        self.mode = config.mode
        if self.mode == "auto" and (asked := os.environ.get("WANDB_MODE")) in ("offline", "disabled"):
            self.mode = asked
        if self.mode == "disabled":
            return
        say("wandb starts")
        try:
            if self.mode == "auto":
                self.mode = "online" if has_wandb_key() else "offline"
            if self.mode == "online":
                self._run = self._open("online", self._stable_id())
                say(f"wandb: {self._run.url}")
        except Exception as error:
            say(f"wandb cannot be reached ({described(error)}): recording offline, `wandb sync` sends it later")
            self.mode = "offline"
            _end_service()
        if self.mode == "offline":
            with self._survive():
                self._run = self._open("offline", self._stable_id())
                say(f"wandb: offline in {directory}/wandb; to sync: wandb sync {directory}/wandb/offline-run-*")

    def _open(self, mode: Literal["online", "offline"], run_id: str) -> Any:
        import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            x_disable_machine_info=True,
            save_code=False,
            disable_git=True,  # a git remote's URL may hold a password; environment.json has the commit
            x_service_wait=_SERVICE_SECONDS,
            init_timeout=CONNECTION_SECONDS,
            finish_timeout=CONNECTION_SECONDS,
            finish_timeout_raises=True,
        )
        resume: Any = "allow" if mode == "online" else None
        return wandb.init(
            **self._options, id=run_id, resume=resume, mode=mode, reinit="finish_previous", settings=settings
        )

    def _stable_id(self) -> str:
        """The id in the file `wandb_id`. An empty file, left by a full disk, counts as missing."""
        path = self._directory / "wandb_id"
        known = path.read_text(encoding="utf-8").strip() if path.exists() else ""
        if not known:
            write_text(path, known := secrets.token_hex(4))
        return known

    @contextlib.contextmanager
    def _survive(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._run, self._lost = None, True
            self._say(f"wandb stopped ({described(error)}); metrics.jsonl goes on")

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Mirror the metrics of a step."""
        with self._survive():
            if self._run is not None:
                self._run.log(_measured(metrics), step=step)

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Send what is left, for at most a minute. If wandb failed during the run, record the whole run again."""
        with self._survive():
            if self._lost:
                self._record_anew()
            if self._run is not None:
                self._run.summary.update(summary)
        if self._run is not None:
            try:
                self._run.finish(exit_code=exit_code)
            except Exception as error:
                files = self._directory / "wandb" / ("run-*" if self.mode == "online" else "offline-run-*")
                sync = f"wandb sync --no-skip-online {files}"
                self._say(f"wandb has not taken everything ({described(error)}); later: {sync}")

    def _record_anew(self) -> None:
        _end_service()
        self.mode = "offline"
        self._run = self._open("offline", secrets.token_hex(4))
        for record in self._history():
            metrics = {key: value for key, value in record.items() if "/" in key}
            self._run.log(_measured(metrics), step=record["step"])
        self._say("the whole run is recorded offline for wandb, `wandb sync` sends it")


def _measured(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics without those that are None. The first None makes wandb import pandas, which takes seconds."""
    return {name: value for name, value in metrics.items() if value is not None}


def _end_service() -> None:
    """Make wandb start a new process: the existing one may be dead, or stuck on a run that failed."""
    import wandb

    with contextlib.suppress(Exception):
        wandb.teardown()

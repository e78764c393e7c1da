"""Where a run's numbers go: metrics.jsonl (always), wandb (a mirror), the console and train.log (for people)."""

import contextlib
import importlib.util
import time
import uuid
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from linrnn.config.schema import WandbConfig
from linrnn.errors import UnsupportedError

_SERVICE_SECONDS = 120  # for wandb's own process to start: a loaded machine takes longer than its 30


def has_wandb_key() -> bool:
    """Whether wandb is there and finds an API key (environment or netrc), without asking for one or going online."""
    if importlib.util.find_spec("wandb") is None:
        return False
    import wandb

    wandb.setup(wandb.Settings(silent=True, x_service_wait=_SERVICE_SECONDS))
    return bool(wandb.login(prompt=False, verify=False))


def check_wandb(config: WandbConfig) -> None:
    """Refuse a mode that wandb cannot serve here.

    Raises:
        UnsupportedError: wandb is not installed, or `mode=online` without an API key.
    """
    if config.mode != "disabled" and importlib.util.find_spec("wandb") is None:
        raise UnsupportedError(
            "wandb is not installed", "pip install wandb, or use logger.wandb.mode=disabled (metrics.jsonl is written)"
        )
    if config.mode == "online" and not has_wandb_key():
        raise UnsupportedError(
            "logger.wandb.mode=online: wandb has no API key",
            "run `wandb login` or set WANDB_API_KEY, or use logger.wandb.mode=offline and sync later",
        )


class Silence:
    """A console that says nothing: that of every rank but the first."""

    def line(self, text: str = "") -> None:
        """A line for people."""

    def progress(self, text: str, *, final: bool = False) -> None:
        """A progress line."""


class Console(Silence):
    """Lines for people, on standard output and in train.log; progress lines at most every `every_seconds`."""

    def __init__(self, log_path: Path, every_seconds: float) -> None:
        self._log: TextIO = log_path.open("a")
        self._every = every_seconds
        self._last = float("-inf")

    def line(self, text: str = "") -> None:
        print(text, flush=True)
        print(text, file=self._log, flush=True)

    def progress(self, text: str, *, final: bool = False) -> None:
        """A progress line: always in train.log, on the console when it is due or `final`."""
        now = time.monotonic()
        print(text, file=self._log, flush=True)
        if final or now - self._last >= self._every:
            self._last = now
            print(text, flush=True)

    def close(self) -> None:
        self._log.close()


class WandbMirror:
    """Mirrors metrics to wandb; whatever fails there is said once and never stops a run.

    Args:
        config: mode, project, entity and tags.
        directory: the run directory; offline runs lie in `<directory>/wandb/offline-run-*`.
        run_name, group: names in wandb; the run's id is kept in `wandb_id`, so that a resumed run continues it.
        hyperparameters: the whole configuration as a flat mapping.
        say: prints one line for the user.
    """

    def __init__(
        self,
        config: WandbConfig,
        directory: Path,
        *,
        run_name: str,
        group: str,
        tags: list[str],
        hyperparameters: dict[str, Any],
        say: Any,
    ) -> None:
        self._run: Any = None
        self._say = say
        if config.mode == "disabled":
            return
        import wandb

        self.mode: str = config.mode
        with self._survive():
            if self.mode == "auto":
                self.mode = "online" if has_wandb_key() else "offline"
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=run_name,
                group=group,
                tags=tags,
                config=hyperparameters,
                dir=str(directory),
                id=self._stable_id(directory, uuid.uuid4().hex[:8]),
                resume="allow" if self.mode == "online" else None,
                mode=cast(Literal["online", "offline"], self.mode),
                reinit="finish_previous",
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    x_disable_machine_info=True,
                    save_code=False,
                    x_service_wait=_SERVICE_SECONDS,
                ),
            )

    @staticmethod
    def _stable_id(directory: Path, fresh: str) -> str:
        path = directory / "wandb_id"
        if not path.exists():
            path.write_text(fresh)
        return path.read_text().strip()

    @contextlib.contextmanager
    def _survive(self) -> Any:
        try:
            yield
        except Exception as error:
            self._run = None
            self._say(
                f"wandb stopped ({type(error).__name__}: {(str(error).splitlines() or [''])[0]}); metrics.jsonl goes on"
            )

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        if self._run is not None:
            with self._survive():
                self._run.log(metrics, step=step)

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        if self._run is not None:
            with self._survive():
                self._run.summary.update(summary)
                self._run.finish(exit_code=exit_code)

"""Random and hostile command lines. Each makes a configuration or ends in a one-line cause; none has any other effect.

150 by default, all in this process; a thousand: LINRNN_FUZZ=1000 pytest tests/config/test_hostile_overrides.py
"""

import os
import random
import string
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from linrnn.config import CONFIG_DIR, data_for, load_config, read_config, run_name, to_yaml
from linrnn.config.bounds import fields_of
from linrnn.config.cli import one_line, split_overrides
from linrnn.config.compose import menu_of, options_of
from linrnn.config.grids import sweep_points
from linrnn.config.schema import SCHEMAS
from linrnn.core.errors import ConfigError, LinrnnError
from linrnn.training.plan import make_training_plan

COUNT = int(os.environ.get("LINRNN_FUZZ", "150"))
SEED = int(os.environ.get("LINRNN_FUZZ_SEED", "0"))
FORBIDDEN = {
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen"),
    *("socket.connect", "pickle.find_class", "os.putenv", "os.unsetenv", "ctypes.dlopen", "urllib.Request"),
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod", "shutil.rmtree"),
}


class Watch:
    """Records Python's audit events while `on` (an audit hook can never be removed)."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[tuple[str, Any]] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in FORBIDDEN or writes:
            self.seen.append((event, arguments))

    @contextmanager
    def watching(self) -> Iterator[list[tuple[str, Any]]]:
        self.seen, self.on = [], True
        try:
            yield self.seen
        finally:
            self.on = False


WATCH = Watch()


@pytest.fixture
def hostile_values(tmp_path: Path) -> list[str]:
    canary = tmp_path / "executed"
    (tmp_path / "elsewhere.yaml").write_text("seed: 1\n")
    call = f"__import__('os').system('touch {canary}')"
    up = "../" * len(CONFIG_DIR.parts)
    return [
        f"{{_target_: os.system, _args_: [touch {canary}]}}",
        *(f"{{_target_: subprocess.Popen, args: [touch, {canary}]}}", "os.system", call, f'"{call}"'),
        *(f"lambda: {call}", f"!!python/object/apply:os.system ['touch {canary}']"),
        *(f"'!!python/object/apply:os.system [touch {canary}]'", f"$(touch {canary})", f"`touch {canary}`"),
        *(f"; touch {canary} #", f"| touch {canary}", "${oc.env:HOME}", "'${oc.env:WANDB_API_KEY}'"),
        *("${oc.create:{a: 1}}", f"${{eval:{call}}}", "${hydra:runtime.cwd}", "\\${oc.env:HOME}"),
        *(f"{up}{tmp_path}/elsewhere", f"{tmp_path}/elsewhere", "../train", "..", "/etc/passwd", "~/x"),
        *(f"file://{tmp_path}/elsewhere.yaml", "pkg://os", "\x00", "a\x00b", "a\nerror: b", "\x1b[2J"),
        *("\u202egnp.exe", "{}", "[]", "[[[[[[]]]]]]", "[" * 1500, "[" * 30000, "{a:" * 400, "1" * 6000),
        *("x" * 5000, "nan", "inf", "-inf", "1e400", "-1", "0", "2147483648", "9" * 30, "0x10", "1_000"),
        *("true", "null", "", "''", '"', "a=b=c", "a,b,c", "choice(1,2)", "range(1,1000000000)", "glob(*)"),
        *("interval(0,1)", "sort(3,2,1)", "extend_list(1)", "int(x)"),
    ]


def hostile_keys(draw: random.Random) -> list[str]:
    leaves = [key for key, *_ in fields_of(load_config())]
    groups = [*SCHEMAS, "experiment"]
    hydra = ["hydra.run.dir", "hydra.sweep.dir", "hydra.callbacks.x._target_", "hydra.job.env_set.LD_PRELOAD"]
    hydra += ["hydra.searchpath", "hydra/launcher", "hydra.launcher._target_", "hydra.mode", "hydra/callbacks", "hydra"]
    odd = ["_target_", "model._target_", "trainer.__class__", "__class__", "model.__init__", "a.b.c", "", ".", ".."]
    odd += ["@", "model@trainer", "/model", "schema/train", "model/../data", "defaults", "size.mixers.gla"]
    odd += ["size.mixers"]
    typos = [draw.choice(leaves)[:-1] + draw.choice(string.ascii_lowercase) for _ in range(20)]
    return [*leaves, *leaves, *groups, *hydra, *odd, *typos]


QUIET = ["device=cpu", "logger.wandb.mode=disabled"]
NEEDED = {"train": [], "evaluate": ["checkpoint=x"], "generate": ["checkpoint=x"], "run_sweep": ["sweep=mve"]}


def composed(command: str, line: list[str]) -> None:
    """What a command does with its overrides before it begins to work."""
    if command == "run_sweep":
        own, runs = split_overrides([*NEEDED[command], *line], command)
        sweep_points(load_config(own, command).sweep, runs)
    elif command == "train":
        config = load_config([*line, *QUIET])
        name = run_name(config)
        to_yaml(config)
        make_training_plan(config)
        assert "/" not in f"{name}{config.group}", line
        assert not f"{name}{config.group}".startswith("."), line
    else:
        config = load_config([*NEEDED[command], *line], command)
        if command == "evaluate":
            data_for(load_config().data, config.data)


@pytest.mark.parametrize("command", NEEDED)
def test_random_and_hostile_command_lines(command, hostile_values, tmp_path):
    draw = random.Random(SEED)
    own = [] if command == "train" else [key for key, *_ in fields_of(load_config(NEEDED[command], command))]
    keys = [*hostile_keys(draw), *own * 5]
    options = [option for group in menu_of() for option in options_of(group)]
    make_training_plan(load_config(QUIET))  # imports everything beforehand
    values: list[Callable[[], str]] = [
        lambda: draw.choice(hostile_values),
        lambda: draw.choice(hostile_values),
        lambda: str(draw.choice(options)),
        lambda: str(draw.choice([0, 1, 2, 3, 64, 0.5, 1e-3])),
        lambda: "".join(draw.choices(string.printable, k=draw.randint(1, 12))),
    ]
    accepted, count = 0, COUNT if command == "train" else COUNT // 10
    for number in range(count):
        prefixes = draw.choices(["", "+", "++", "~", "@", "--", "$"], [20, 2, 2, 2, 1, 1, 1], k=draw.randint(1, 3))
        line = [f"{prefix}{draw.choice(keys)}={draw.choice(values)()}" for prefix in prefixes]
        with WATCH.watching() as seen:
            try:
                composed(command, line)
                accepted += 1
            except LinrnnError as error:
                for text in (error.cause, error.remedy):
                    assert one_line(text), line
                    assert "\n" not in one_line(text), line
            except Exception as error:
                raise AssertionError(f"line {number} of seed {SEED}: {line!r}: {error!r}") from error
        assert not seen, f"{line!r} did {seen[0]}"
    assert not (tmp_path / "executed").exists()
    assert command != "train" or COUNT / 50 < accepted < COUNT, accepted


@pytest.mark.parametrize(
    "text",
    ["seed: !!python/object/apply:os.system ['touch executed']", "seed: ${oc.env:HOME}", "model: [1", "[]",
     "just words", "model: {name: {_target_: os.system}}", "\x00"],
)  # fmt: skip
def test_a_hostile_config_yaml_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    with WATCH.watching() as seen, pytest.raises(ConfigError):
        read_config(tmp_path / "config.yaml")
    assert not seen
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]

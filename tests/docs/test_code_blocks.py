"""Every code block of the README and of docs/ works: commands are composed, Python is executed, no block is skipped."""

import ast
import re
import shlex
import subprocess
import tomllib
from importlib import import_module

import pytest
import yaml
from blocks import PAGES, ROOT, Block, blocks, commands
from cce_kernels.cost.__main__ import parsed
from cce_kernels.cost.presets import PRESETS

import linrnn.config
from linrnn.commands import COMMANDS
from linrnn.config import load_config
from linrnn.config.cli import split_overrides
from linrnn.config.grids import sweep_points

BLOCKS = [block for page in PAGES for block in blocks(page)]
LANGUAGES = {"bash", "python", "yaml", "mermaid", "text"}
COMMAND = re.compile(r"^\s*(?:\$ )?(?:python|linrnn|make|torchrun|pip|source|git) \S", re.MULTILINE)
ENTRY = re.compile(r"^    (?:cli\.|common\.)?run\((?:main)?(?:, )?(?:\"(\w+)\")?", re.MULTILINE)
START = re.compile(r"^    start\(\"(\w+)\"\)", re.MULTILINE)
# Commands of other programs, literally: this test cannot check them.
FIXED = {
    "source .venv/bin/activate",
    "jupyter lab notebooks",
    "sbatch --gpus=1 --time=60 --wrap python train.py model=gla size=1b3",
    "python -m http.server --directory site",
    "git clone URL linrnn && cd linrnn",
    "apt-get download linux-source-6.1",
    "dpkg-deb -x linux-source-6.1_*.deb .",
    "tar xf usr/src/linux-source-6.1.tar.xz",
}


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_says_what_it_is_and_text_holds_no_command(block):
    assert block.language in LANGUAGES, f"{block}: classify the block as one of {sorted(LANGUAGES)}"
    assert block.language != "text" or not COMMAND.search(block.text), f"{block}: commands stand in bash blocks"


# --------------------------------------------------------------------------------------------------------- commands
def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        assert "=" in word or re.search(rf"^{word}:", makefile, re.MULTILINE), f"the Makefile has no target {word}"


def check_pip(words: list[str]) -> None:
    [verb, requirement] = words
    assert verb == "install"
    path, _, extras = requirement.removesuffix("]").partition("[")
    project = tomllib.loads((ROOT / path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(filter(None, extras.split(","))) <= set(project.get("optional-dependencies", {}))


def check_git(words: list[str]) -> None:
    assert words[0] == "apply"
    subprocess.run(["git", "apply", "--check", *words[1:]], cwd=ROOT, check=True)


def check_pytest(words: list[str]) -> None:
    paths = [word for word in words if word.startswith("tests")]
    assert paths
    assert all((ROOT / path.partition("::")[0]).exists() for path in paths), words


def check_script(script: str, overrides: list[str]) -> None:
    """The script exists and accepts these overrides."""
    source = (ROOT / script).read_text(encoding="utf-8")
    if script.startswith(("benchmarks/", "study/")):  # adds its keys when it is imported
        import_module(script.removesuffix(".py").replace("/", "."))
    overrides = [override for override in overrides if override != "--help"]
    if started := START.search(source):
        check_command(started[1], overrides)
        return
    entry = ENTRY.search(source)
    if entry is None:  # a command line of its own, which its docstring lists
        usage = ast.get_docstring(ast.parse(source)) or ""
        keys = [f"{override.partition('=')[0]}=" for override in overrides]
        assert shlex.join(["python", script, *overrides]) in usage or all(key in usage for key in keys), overrides
    else:
        load_config(overrides, entry[1] or "train")


def check_command(name: str, overrides: list[str]) -> None:
    """The command accepts these overrides."""
    command = COMMANDS[name]
    if not command.makes_runs:
        load_config(overrides, command.config_name)
        return
    own, runs = split_overrides(overrides, command.config_name)
    config = load_config(own, command.config_name)
    points = sweep_points(config.sweep, runs) if name == "sweep" else [runs]
    for point in {tuple(point) for point in (points[0], points[-1])}:  # test_grids.py composes all
        load_config(point)


def check(words: list[str]) -> None:
    program, *rest = words
    if " ".join(words) in FIXED:
        return
    if program == "make":
        check_make(rest)
    elif program == "git":
        check_git(rest)
    elif program == "pip":
        check_pip(rest)
    elif words[:3] == ["python", "-m", "pytest"]:
        check_pytest(rest[2:])
    elif words[:3] == ["python", "-m", "cce_kernels.cost"]:
        values, overrides = parsed(rest[2:])
        assert values["model"] in PRESETS or overrides
    elif words[:2] == ["python", "-m"] and words[2].startswith("study."):
        assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file()
        assert not words[3:]
    elif program == "torchrun":
        script = next(number for number, word in enumerate(rest) if word.endswith(".py"))
        assert all(re.match(r"--(nnodes|nproc-per-node|rdzv-backend|rdzv-endpoint)=", word) for word in rest[:script])
        check_script(rest[script], rest[script + 1 :])
    elif program == "linrnn":
        check_command(rest[0], [word for word in rest[1:] if word != "--help"])
    elif program == "python" and rest[0].endswith(".py"):
        check_script(rest[0], rest[1:])
    else:
        pytest.fail(f"{' '.join(words)}: no check knows this command; teach this file to check it")


@pytest.mark.parametrize("block", of("bash"), ids=str)
def test_the_commands_are_composed(block):
    found = list(commands(block))
    assert found
    for words in found:
        check(words)


@pytest.mark.parametrize(
    "line",
    ["python train.py loss=cce_kahn", "linrnn sweep sweep=mev", "make trian", "rm -r results", "python scripts/no.py"],
)
def test_a_wrong_command_is_found(line):
    with pytest.raises((Exception, pytest.fail.Exception)):
        check(line.split())


# ---------------------------------------------------------------------------------------------- Python, YAML, diagrams
@pytest.mark.usefixtures("new_losses")
@pytest.mark.parametrize("page", sorted({block.page for block in of("python")}))
def test_the_python_of_a_page_runs_from_top_to_bottom(page, small, monkeypatch, tmp_path):
    def load_small(overrides: list[str], config_name: str = "train") -> object:
        return load_config([*overrides, *small()] if config_name == "train" else overrides, config_name)

    monkeypatch.setattr(linrnn.config, "load_config", load_small)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in of("python"):
        if block.page == page:
            code = compile("\n" * block.line + block.text, str(ROOT / page), "exec")
            if block.runs:
                exec(code, names)


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_the_yaml_can_be_read(block):
    assert yaml.safe_load(block.text)


def test_the_diagram_shows_the_packages_in_their_order():
    [layering] = ROOT.glob("tests/**/test_layering.py")
    tree = ast.parse(layering.read_text(encoding="utf-8"))
    [order] = [
        [constant.value for constant in ast.walk(node.value) if isinstance(constant, ast.Constant)]
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ORDER"
    ]
    [first, *_] = of("mermaid")
    drawn = [re.findall(r"\w+", line) for line in first.text.splitlines() if "-->" in line]
    assert [name for line in drawn if "kernels" not in line for name in line] == [
        name for name in [*order, "commands"] for _ in range(2 if name == "costs" else 1)
    ]

"""Values of string keys are taken literally: Hydra interprets no character of a path."""

import dataclasses
import math
import os
import shutil
from collections.abc import Iterator

import pytest

import linrnn.commands
from linrnn.config import compose, load_config, overrides_of
from linrnn.config.bounds import fields_of
from linrnn.config.cli import check_arguments
from linrnn.config.grids import sweep_points
from linrnn.config.schema import COMMANDS, SCHEMAS, SweepConfig
from linrnn.core.errors import ConfigError

HOSTILE = [
    *("a b", " a ", "it's", 'say "x"', "a,b", "a=b", "[x]", "a[1", "{x}", "a}", "$HOME", "$(ls)"),
    *("back\\slash", "end\\", "'\\", "über/größe", "日本", "😀", "a(b)", "choice(a)", "a#b", "a;b&c|d", "~/x"),
    *("a:b", "50%", "*?", "-x", "@x", "!x", "true", "1e5", "0x10", "a'b\"c", "a  b"),
]
NEEDED = {"evaluate": ["checkpoint=x"], "generate": ["checkpoint=x"], "export": ["checkpoint=x", "output=y"]}
NEEDED |= {"report": ["group=x"], "run_sweep": ["sweep=mve"]}

OURS = sorted({command.config_name for command in linrnn.commands.COMMANDS.values()})


def path_keys(schema: type) -> Iterator[str]:
    """The keys of a schema (without groups below it) that hold one path."""
    for field in dataclasses.fields(schema):
        if "path" in field.metadata and field.type != list[str]:
            yield field.name


def keys_of_paths() -> list[tuple[str, list[str], str]]:
    """Every key that holds a path: its command, the group option that has it, and the key."""
    own = [(command, [], key) for command in OURS for key in path_keys(COMMANDS[command])]
    of_groups = [
        ("train", [f"{group}={option}"], f"{group}.{key}")
        for group, options in SCHEMAS.items()
        for option, schema in options.items()
        for key in path_keys(schema)
    ]
    return own + of_groups


def value_of(config: object, key: str) -> object:
    return next(getattr(owner, field.name) for name, owner, field in fields_of(config) if name == key)


@pytest.mark.parametrize(("number", "of_key"), enumerate(keys_of_paths()), ids=str)
def test_every_key_of_a_path_takes_every_name(number, of_key):
    """Each key an eighth of the names. Names are read alike for all keys of one type."""
    command, option, key = of_key
    needed = [o for o in [*NEEDED.get(command, []), *option] if not o.startswith(f"{key}=")]
    needed += ["data.path=x"] if option == ["data=text"] and key != "data.path" else []
    for name in HOSTILE[number % 8 :: 8]:
        mark = '"' if key in ("data.path", "data.valid_path") and name[0] == "[" else ""  # which reads as a list
        if key == "model.config":  # a file that must be there, or a name of FLA's: the refusal repeats it
            with pytest.raises(ConfigError) as refusal:
                load_config([*needed, f"{key}={name}"], command)
            assert f"{key}={os.path.expanduser(name)}: " in refusal.value.cause
            continue
        found = value_of(load_config([*needed, f"{key}={mark}{name}{mark}"], command), key)
        assert found == os.path.expanduser(name)


PROMPT = 'He said: "it\'s, well,\nfine" [x]'
PATHS = {
    "[a.txt,b]": ["a.txt", "b"],
    "['~/a b.txt', /c*]": [os.path.expanduser("~/a b.txt"), "/c*"],
    "['it\\'s, x']": ["it's, x"],
    "'[a]'": "[a]",
    "[a].txt": "[a].txt",
    "a,b": "a,b",
}
SEPARATORS = ("\n---\n", "blank_line", "1", "null\n", "[x]", "a,b", " ")
VALUES: list[tuple[str, str, str, object]] = [
    *(("train", key, given, value) for key in ("data.path", "data.valid_path") for given, value in PATHS.items()),
    *(("train", "data.document_separator", separator, separator) for separator in SEPARATORS),
    ("train", "results_dir", "'a, b'", "a, b"),
    ("train", "init_from", '"it\'s"', "it's"),
    ("train", "init_from", "null", None),
    ("train", "init_from", "'null'", "null"),
    ("generate", "prompt", PROMPT, PROMPT),
    ("runs", "compare", "[\"a, b\",c d,'ü']", ["a, b", "c d", "ü"]),  # a list keeps Hydra's grammar
]


@pytest.mark.parametrize(("command", "key", "given", "value"), VALUES)
def test_a_string_is_what_stands_there_and_a_list_is_hydra_s(command, key, given, value):
    needed = {"train": ["data=text", "data.path=x"], **NEEDED}.get(command, [])
    assert value_of(load_config([*needed, f"{key}={given}"], command), key) == value


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        (["data.path=[a,3]"], "data.path holds 3, which is no path"),
        (["data.path=[a,'']"], "data.path is empty"),
        (["data.path=null"], "data.path names no file"),
        (["data.path=[it's,b]"], "cannot be read"),
        (["data.path=x", "data.document_separator=''"], "data.document_separator is empty"),
        (["data.sources=[{path:a,weight:-0.1},{path:b}]"], "data.sources: a has weight -0.1"),
        (["data.sources=[{path:a,weight:0},{path:b}]"], "data.sources: a has weight 0"),
        (["data.sources=[{path:a,weight:inf},{path:b}]"], "data.sources: a has weight inf"),
        (["data.sources=[{path:a,weight:0.1234567},{path:b}]"], "weights with so many digits"),
        (["data.sources=[{path:a,weight:much},{path:b}]"], "'much' of type 'str' could not be converted to Float"),
        (["data.sources=[{path:a,wait:1},{path:b}]"], "wait: there is no such key"),
        (["data.sources=[{path:'',weight:1},{path:b}]"], r"data.sources\[0\].path is empty"),
        (["data.sources=[{weight:1},{path:b}]"], r"data.sources\[0\].path must be given"),
        (["data.sources=[{path:a}]"], "data.sources names one source"),
        (["data.sources=[{path:a},{path:b}]", "data.path=c"], "data.path and data.sources are both given"),
    ],
)
def test_what_is_no_path_or_separator_is_refused(overrides, cause):
    with pytest.raises(ConfigError, match=cause):
        load_config(["data=text", *overrides])


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "\x1b[2J", "a\x00b", "\u202egnp"])
def test_a_path_that_cannot_be_printed_is_refused(text):
    with pytest.raises(ConfigError, match="cannot be printed"):
        load_config([f"results_dir={text}"])


def test_a_list_that_cannot_be_read_is_refused_with_how_to_quote():
    with pytest.raises(ConfigError, match="cannot be read") as error:
        load_config(["compare=[it's,ü]"], "runs")
    assert "'compare=[\"a, b\",c]'" in error.value.remedy


def test_a_key_may_be_given_twice_with_one_value():
    check_arguments(["seed=1", "model=gla", "seed=1"])
    with pytest.raises(ConfigError, match=r"model is given twice \(gla, kda\)"):
        check_arguments(["model=gla", "seed=1", "model=kda", "model=fla"])


def test_every_float_key_is_finite_and_every_integer_fits_in_64_bits():
    config = load_config(["parallel=ddp"])
    for key, _, field in fields_of(config):
        for kind, value in ((float, "inf"), (int, "99999999999999999999")):
            if key != "optimizer.max_grad_norm" and field.type in (kind, kind | None):
                with pytest.raises(ConfigError, match=r"finite|64 bits|above the maximum"):
                    load_config(["parallel=ddp", f"{key}={value}"])
    with pytest.raises(ConfigError, match="64 bits"):
        load_config(["checkpoint=x", "prompt_tokens=[99999999999999999999]"], "generate")


def test_an_infinite_max_grad_norm_is_pytorch_s_word_for_no_clipping():
    config = load_config(["optimizer.max_grad_norm=inf"])
    assert config.optimizer.max_grad_norm is None
    assert config == load_config(["optimizer.max_grad_norm=null"])
    assert math.isfinite(load_config().optimizer.max_grad_norm)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=kda", "loss=standard", "size=mve", "seed=3"],
        ["data=text", "data.path=[a.txt,my notes/*.md,'[x]']", 'data.valid_path=["it\'s, ü"]'],
        ["data=text", "data.path='[x]'", "data.document_separator=<|endoftext|>"],
        ["data=text", "data.path=it's [mine], ü", "init_from=null", "results_dir='null'", "run_name=x"],
        ["loss=cce_filter", "loss.filter_eps=1e-5", "optimizer.max_grad_norm=inf", "trainer.compile=blocks"],
        ["parallel=fsdp", "parallel.shard_ranks=2", "logger.wandb.tags=[a,'b, c']", "size.mixers.gla.num_heads=2"],
        ["experiment=mve", "trainer.max_tokens=null", "trainer.max_steps=7", "results_dir='quoted\\''"],
    ],
)
def test_a_configuration_goes_back_to_the_overrides_that_make_it(overrides):
    config = load_config(overrides)
    assert load_config(overrides_of(config)) == config
    assert len(overrides_of(config)) <= len(overrides) or "experiment=mve" in overrides


# -------------------------------------------------------------------------------------------------------- sweeps
def test_a_sweep_takes_several_values_and_paths_as_they_stand():
    sweep = SweepConfig(name="x", overrides=[], grids=[{"loss": ["standard"]}])
    points = sweep_points(sweep, ["data.path=/my texts/it's.txt", "init_from=a,b", "results_dir=a=b"])
    assert [load_config(["data=text", *point]).data.path for point in points] == ["/my texts/it's.txt"] * 2
    assert [load_config(["data=text", *point]).init_from for point in points] == ["a", "b"]
    assert {load_config(["data=text", *point]).results_dir for point in points} == {"a=b"}


def test_a_sweep_asks_whether_a_comma_divides_values():
    sweep = SweepConfig(name="x", overrides=["data=text"], grids=[{"seed": [0]}])
    with pytest.raises(ConfigError, match="one value or several") as error:
        sweep_points(sweep, ["data.path=it's,b"])
    assert "'data.path=\"a, b\",c'" in error.value.remedy
    assert [load_config(point).data.path for point in sweep_points(sweep, ["data.path='it,s',b"])] == ["it,s", "b"]


def test_a_grid_s_strings_lists_and_mappings_reach_the_runs():
    grid = {"init_from": ["a, b", "it's"], "logger.wandb.tags": [["ü", "x, y"], []]}
    points = [load_config(point) for point in sweep_points(SweepConfig(name="x", overrides=[], grids=[grid]), [])]
    assert [config.init_from for config in points] == ["a, b", "a, b", "it's", "it's"]
    assert [config.logger.wandb.tags for config in points] == [["ü", "x, y"], []] * 2


# ------------------------------------------------------------------------------------------------- broken files
HEAD = "# A sweep.\n\nname: broken\noverrides: []\n"


@pytest.mark.parametrize(
    ("group", "text", "cause"),
    [
        ("sweep", f"{HEAD}grids:\n  - {{model: [gla], loss: [compiled}}\n", "line 6"),
        ("sweep", f"{HEAD}grids:\n\t- {{model: [gla]}}\n", "line 6"),
        ("sweep", f"{HEAD}grids:\n  - {{model: [gla]}}\n  - {{model: gla}}\n", "sweep.grids[1]: "),
        ("sweep", f"{HEAD}grids:\n  - {{model: [gla], model: [kda]}}\n", "found duplicate key model"),
        ("sweep", f"{HEAD}grid:\n  - {{model: [gla]}}\n", "sweep.grid: "),
        ("sweep", f"{HEAD}grids:\n  - {{seed: [!!python/object/apply:os.system [ls]]}}\n", "line 6"),
        ("sweep", "name: \x00\n", "configs/sweep/broken.yaml"),
        ("sweep", "name: broken\noverrides: [trainer.max_steps: 3]\ngrids: []\n", "sweep.overrides holds"),
        ("experiment", "overrides: [mve]\n", "'mve' cannot be read"),
        ("experiment", "overrides: [size=mvee]\n", "size=mvee: there is no such size"),
        ("experiment", "overrides: [sise=mve]\n", "sise: there is no such key"),
        ("experiment", "overrides: [size=mve\nseed: 1\n", "while parsing a flow sequence"),
        ("experiment", "overrides: [seed: 1]\n", "overrides holds {'seed': 1}, which is no text"),
        ("experiment", "", "overrides must be given"),
        ("experiment", "overrides: [experiment=mve]\n", "an experiment chooses no other one"),
        ("experiment", "trainer: {max_steps: 5}\n", "experiment.trainer"),
    ],
)
def test_a_broken_file_is_named_with_its_line_or_key(group, text, cause, tmp_path, monkeypatch):
    shutil.copytree(compose.CONFIG_DIR, tmp_path / "configs")
    monkeypatch.setattr(compose, "CONFIG_DIR", tmp_path / "configs")
    (tmp_path / "configs" / group / "broken.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as error:
        load_config([f"{group}=broken"], "run_sweep" if group == "sweep" else "train")
    assert cause in error.value.cause
    assert f"configs/{group}/broken.yaml: " in error.value.cause or "sweep.overrides" in cause
    assert error.value.remedy

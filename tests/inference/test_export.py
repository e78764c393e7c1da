"""A trained model is exported as a Hugging Face directory with equal logits, and both generate text."""

import importlib
import io
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import small_disk
import torch
import torch.nn.functional as F
import transformers
from fitting import fitted, summary_of
from forked import start

from linrnn.config import last_of_each, load_config
from linrnn.config.schema import GenerateConfig
from linrnn.core.errors import ConfigError, DataError, StorageError, UnsupportedError
from linrnn.data.tokenizer import train_tokenizer
from linrnn.inference.export import export
from linrnn.inference.generate import Printer, prompt_of, prompts, samples
from linrnn.inference.load import load_trained
from linrnn.models.attention import with_sdpa
from linrnn.models.fla_import import fla_classes
from linrnn.training.checkpoint import found
from linrnn.training.trainer import Trainer

Small = Callable[..., list[str]]
CPU = torch.device("cpu")
TWO = torch.tensor([2])
MODELS = ("gla", "gated_deltanet", "kda", "transformer")


@pytest.fixture(scope="module")
def run_path(small_of_module: Small) -> Path:
    """A run that tests read."""
    return fitted(small_of_module()).directory.path


def options(**changes: Any) -> GenerateConfig:
    config = load_config(["checkpoint=unused"], "generate")
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.fixture
def text(on_text: Small, tmp_path: Path) -> list[str]:
    """Overrides of a run on text, with a tokenizer trained on it."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join(f"the cat number {i} sat on mat number {i * i % 97} again" for i in range(400)))
    return on_text(f"data.path={corpus}")


@pytest.mark.parametrize("model", MODELS)
def test_fla_loads_an_export_with_equal_logits_and_samples_carry_the_state_on(model, small, tmp_path):
    overrides = small(f"model={model}", f"size.tie_embeddings={str(model in MODELS[:2]).lower()}")
    trainer = fitted(overrides)
    run = load_trained(str(trainer.directory.path), CPU)
    export(run, tmp_path / "out")
    of_fla = transformers.AutoModelForCausalLM
    if model == "transformer":  # which FLA builds with the flash_attn package alone
        of_fla = with_sdpa(fla_classes(model)[0])
    loaded = of_fla.from_pretrained(tmp_path / "out")
    ids = torch.randint(0, 512, (2, 70))
    assert torch.equal(logits(loaded, ids), logits(trainer.model.hf, ids))
    other = Trainer(load_config([*overrides, "group=other", f"init_from={tmp_path}/out"]))  # a run that starts from it
    assert torch.equal(logits(other.model.hf, ids), logits(trainer.model.hf, ids))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    own = {"linrnn_config.yaml", "SHA256SUMS", "README.md"}
    assert names == {"config.json", "generation_config.json", "model.safetensors", *own}
    card, summary = (tmp_path / "out" / "README.md").read_text(), summary_of(trainer)
    assert f"* Model: {model}, {summary['n_parameters']:,} parameters" in card
    assert f"steps with loss=cce_kahan, {summary['tokens']:,} tokens" in card
    assert f"* Validation: {summary['valid_loss_nats']:.4f} nats a token" in card
    again = load_config(shlex.split(card.split("```bash")[1].split("```")[0])[2:])
    assert again.trainer.max_steps == trainer.config.trainer.max_steps

    exported = load_trained(str(tmp_path / "out"), CPU)
    greedy = {"temperature": 0.0, "max_new_tokens": 12, "prompt_tokens": [5, 6, 7, 0, 9]}
    [(prompt, tokens)] = samples(run, options(**greedy))
    assert len(tokens) == 12 or tokens[-1] == 0
    read = prompt + tokens  # all at once, without a state
    best = logits(run.model, torch.tensor([read]))[0].argmax(-1)
    assert best[len(prompt) - 1 : -1].tolist() == tokens
    assert list(samples(exported, options(**greedy))) == [(prompt, tokens)]


def test_reading_a_checkpoint_draws_no_weights(small, monkeypatch):
    """The weights are read, so drawing them first would take a 1.3B model many seconds for nothing."""
    run = fitted(small())
    before = torch.get_rng_state()
    monkeypatch.setattr(
        "linrnn.inference.load.BlankModel.init_weights", Mock(side_effect=AssertionError("weights are drawn"))
    )
    read = load_trained(str(run.directory.path), torch.device("cpu"))
    pairs = zip(read.model.parameters(), run.model.parameters(), strict=True)
    assert all(torch.equal(here, there) for here, there in pairs)
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn from the global generator either"


def test_sampling_follows_seed_temperature_top_k_and_top_p(run_path):
    run = load_trained(run_path, CPU)

    def drawn(**changes: Any) -> list[list[int]]:
        defaults = {"prompt_tokens": [5, 6, 7], "max_new_tokens": 8, "n_samples": 3}
        return [tokens for _, tokens in samples(run, options(**{**defaults, **changes}))]

    first = drawn(seed=1)
    assert first == drawn(seed=1)
    assert first != drawn(seed=2)
    assert len({tuple(tokens) for tokens in first}) == 3
    greedy = drawn(temperature=0.0)
    assert greedy[0] == greedy[1] == greedy[2]
    assert drawn(top_k=1) == drawn(top_p=1e-6) == drawn(temperature=1e-4) == greedy
    with torch.no_grad():
        best = set(run.model(torch.tensor([[5, 6, 7]])).logits[0, -1].topk(4).indices.tolist())
    firsts = {tokens[0] for tokens in drawn(top_k=4, max_new_tokens=1, n_samples=60)}
    assert firsts == best


def test_bf16_parameters_are_exported_in_fp32_without_loss(small, tmp_path):
    trainer = fitted(small("model=kda", "trainer.precision=bf16"))
    [step] = found(trainer.directory.checkpoints)
    export(load_trained(shutil.copytree(step, tmp_path / "a_copy"), CPU), tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    here = trainer.model.hf.state_dict()
    assert {tensor.dtype for tensor in here.values()} == {torch.float32, torch.bfloat16}
    assert all(torch.equal(tensor, here[name].float()) for name, tensor in loaded.state_dict().items())


def test_text_goes_in_and_out_by_the_run_s_own_tokenizer(text, tmp_path, command_here):
    trainer = fitted([*text, "trainer.max_steps=30", "trainer.batch_size=8"])
    run = load_trained(str(trainer.directory.path), CPU)
    export(run, tmp_path / "out")
    exported = load_trained(str(tmp_path / "out"), CPU)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    sentence = "the cat number 7 sat"
    assert tokenizer(sentence)["input_ids"] == prompt_of(run, options(prompt=sentence))
    assert tokenizer.eos_token_id == run.eos_id == exported.eos_id == trainer.data.tokenizer.eos_id
    [(prompt, tokens)] = samples(run, options(prompt=sentence, temperature=0.0, max_new_tokens=20))
    assert run.decode(prompt + tokens).startswith(sentence)
    assert tokenizer.decode(prompt) == sentence
    with pytest.raises(ConfigError, match="prompt is not UTF-8 text"):
        prompt_of(run, options(prompt=os.fsdecode(b"caf\xe9")))
    [alone] = samples(exported, options(max_new_tokens=3, seed=3))
    assert alone[0] == [run.eos_id], "without a prompt a document begins"
    overrides = (f"checkpoint={tmp_path}/out", f"prompt={sentence}", "temperature=0", "max_new_tokens=20", "device=cpu")
    done = command_here("scripts/generate.py", *overrides)
    assert run.decode(prompt + tokens).strip() in done.stdout, done.stderr
    done = command_here("scripts/export.py", f"checkpoint={run.source}", f"output={tmp_path}/again")
    assert "it/s]" not in done.stderr, "transformers shows a bar for each file"
    weights = (directory / "model.safetensors" for directory in (tmp_path / "out", tmp_path / "again"))
    assert len({path.read_bytes() for path in weights}) == 1


def test_a_sample_is_printed_while_it_grows_and_prompts_come_from_the_keyboard(text, monkeypatch, capsys):
    run = load_trained(str(fitted(text).directory.path), CPU)
    seen, put = list[str](), Printer.put
    capsys.readouterr()

    def watched(self: Printer, ids: torch.Tensor) -> None:
        put(self, ids)
        seen.append(capsys.readouterr().out)

    monkeypatch.setattr(Printer, "put", watched)
    [(prompt, tokens)] = samples(run, options(prompt="the cat", max_new_tokens=12, seed=1), Printer(run))
    assert len(seen) == 1 + len(tokens)
    assert sum(map(bool, seen)) > 1, "words appear one by one"
    assert "".join([*seen, capsys.readouterr().out]) == run.decode(prompt + tokens) + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\nthe mat\n\nnever\n"))
    assert [one.prompt for one in prompts(options(prompt="-", seed=4))] == ["the cat", "the mat"]
    assert list(prompts(options(prompt="the"))) == [options(prompt="the")]


def test_without_an_end_token_no_token_ends_a_sample(text, tmp_path):
    """FLA's models say by default that token 2 ends a text."""
    made = train_tokenizer([f"the cat number {i} sat on mat number {i}" for i in range(400)], 300)
    content = json.loads(made.json)
    content["model"]["vocab"]["no end"] = content["model"]["vocab"].pop(made.eos_token)
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "added_tokens": []}))
    trainer = fitted([*text, f"data.tokenizer={tmp_path}/tokenizer.json"])
    run = load_trained(str(trainer.directory.path), CPU)
    assert run.eos_id is None
    exported = tmp_path / "out"
    for place in (trainer.directory.path, exported):
        model = load_trained(str(place), CPU)
        model.model.lm_head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, TWO, 1e4))
        [(_, tokens)] = samples(model, options(prompt_tokens=[5, 6], temperature=0.0, max_new_tokens=8))
        assert tokens == [2] * 8
        if not exported.exists():
            export(run, exported)


def test_what_cannot_be_exported_or_generated_from_is_refused(run_path, tmp_path, command_here):
    run = load_trained(run_path, CPU)
    out = tmp_path / "out"
    export(run, out)
    with pytest.raises(ConfigError, match="is there already"):
        export(run, out)
    done = command_here("scripts/export.py", "checkpoint=none", f"output={out}")
    assert done.returncode == 2
    assert "is there already" in done.stderr, "the model is not looked for"
    with pytest.raises(ConfigError, match="is a Hugging Face directory already"):
        export(load_trained(str(out), CPU), tmp_path / "again")
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        load_trained(str(tmp_path), CPU)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        prompt_of(run, options(prompt="words"))
    with pytest.raises(ConfigError, match="512 is no token"):
        prompt_of(run, options(prompt_tokens=[1, 512]))
    with pytest.raises(ConfigError, match="prompt and prompt_tokens are given"):
        prompt_of(run, options(prompt="words", prompt_tokens=[1]))
    (out / "SHA256SUMS").unlink()  # files are changed on purpose from here on
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 3}))
    with pytest.raises(DataError, match=r"lacks model\.layers\.2"):
        load_trained(str(out), CPU)
    (out / "config.json").write_text(json.dumps({**settings, "model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="holds a gpt2"):
        load_trained(str(out), CPU)
    (out / "config.json").write_text(json.dumps(settings))


TASK = """task: of_our_own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


def test_lm_eval_gets_the_model_with_its_tokenizer_and_softcap(text, tmp_path, command_here, monkeypatch):
    """On a task with local data, from an export or from a run."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    words = "the cat number 5 sat on mat 25 again"
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": words}) + "\n")
    (tmp_path / "task.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    for keys in ([], ["loss.softcap=0.5"]):
        checkpoint = fitted([*text, *keys]).directory.path
        run = load_trained(str(checkpoint), CPU)
        if not keys:
            export(run, checkpoint := tmp_path / "out")
        arguments = [f"checkpoint={checkpoint}", "tasks=[of_our_own]", f"tasks_path={tmp_path}"]
        done = command_here("scripts/evaluate.py", *arguments, f"output={tmp_path}/tasks.json", "device=cpu")
        assert "|of_our_own|" in done.stdout, done.stderr
        ids = torch.tensor([[run.eos_id, *run.tokenizer.encode(words)]])
        nats = F.cross_entropy(logits(run.model, ids[:, :-1])[0], ids[0, 1:], reduction="sum")
        found = json.loads((tmp_path / "tasks.json").read_text())["tasks"]["of_our_own"]
        assert found["bits_per_byte,none"] == pytest.approx(nats.item() / math.log(2) / len(words), rel=1e-4)
    for wrong, cause in [
        ("tasks=[of_our_won]", "has no of_our_won"),
        ("loss=standard", "would change nothing"),
        ("tasks_path=/nowhere", "is no folder"),
    ]:
        given = [argument for argument in arguments if not wrong.startswith(argument.partition("=")[0] + "=")]
        done = command_here("scripts/evaluate.py", *given, wrong)
        assert (done.returncode, cause in done.stderr) == (2, True), done.stderr


def test_tasks_without_lm_eval_are_refused_before_the_model_is_looked_for(command_here, monkeypatch):
    real = importlib.import_module
    monkeypatch.setattr(
        importlib, "import_module", lambda name, *more: real("missing_lm_eval" if "lm_eval" in name else name, *more)
    )
    done = command_here("scripts/evaluate.py", "checkpoint=none", "tasks=[arc_easy]")
    assert done.returncode == 4
    assert "error: tasks=arc_easy: " in done.stderr
    assert "pip install" in done.stderr
    assert '"linrnn[eval]"' in done.stderr


def test_a_softcap_is_part_of_the_model_and_validation_is_its_plain_cross_entropy(
    small, tmp_path, command_here, data_cache
):
    """Whatever z_loss and label_smoothing add in training. Samples are drawn from capped logits, too."""
    keys = ["loss.softcap=0.5", "loss.z_loss=0.5", "loss.label_smoothing=0.3"]
    trainer = fitted(small("loss=standard", "trainer.max_steps=3", "optimizer.lr=0.02", *keys))
    run, (batch, *_) = load_trained(str(trainer.directory.path), CPU), trainer._valid_batches
    capped = logits(run.model, batch.input_ids)
    assert torch.equal(capped, logits(trainer.model.hf, batch.input_ids))
    assert 0.4 < capped.abs().max() <= 0.5
    nats = n_tokens = 0
    for batch in trainer._valid_batches:
        rows = logits(run.model, batch.input_ids).flatten(0, 1)
        nats += F.cross_entropy(rows, batch.labels.flatten(), reduction="sum").item()
        n_tokens += batch.n_tokens
    summary = summary_of(trainer)
    assert nats / n_tokens == pytest.approx(summary["valid_loss_nats"])
    assert summary["train_loss_nats"] > summary["valid_loss_nats"] + 0.5 * math.log(512) ** 2 / 2
    assert "loss.softcap=0.5" in summary["training"], "a report compares it with no run of another objective"
    checkpoint, cache = f"checkpoint={trainer.directory.path}", f"data.cache_dir={data_cache}"
    output = tmp_path / "loss.json"
    done = command_here(
        "scripts/evaluate.py", checkpoint, cache, "loss=cce_kahan", "max_tokens=400", f"output={output}"
    )
    assert f"loss {summary['valid_loss_nats']:.4f}" in done.stdout, done.stderr
    assert json.loads(output.read_text())["valid/loss_nats"] == pytest.approx(summary["valid_loss_nats"])
    with pytest.raises(UnsupportedError, match=r"loss\.softcap=0\.5, which FLA's configuration cannot express"):
        export(run, tmp_path / "out")


def test_a_flipped_bit_in_an_export_is_noticed_on_loading_and_in_init_from(run_path, small, tmp_path):
    export(load_trained(run_path, CPU), tmp_path / "out")
    checked = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "out", capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout
    edited = {"SHA256SUMS", "README.md"}  # the card is the owner's to change
    whole = {path: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name not in edited}
    for path, content in whole.items():
        damaged = bytearray(content)
        damaged[-9] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{path.name} does not match its checksum"):
            load_trained(str(tmp_path / "out"), CPU)
        path.write_bytes(content)
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(whole[weights][:-9] + bytes([whole[weights][-9] ^ 4]) + whole[weights][-8:])
    with pytest.raises(DataError, match="does not match its checksum"):
        Trainer(load_config(small("group=other", f"init_from={tmp_path}/out")))
    weights.unlink()
    with pytest.raises(DataError, match="is missing"):
        load_trained(str(tmp_path / "out"), CPU)


def test_every_file_of_a_run_and_an_export_has_the_mode_that_umask_gives(text, tmp_path):
    before = os.umask(umask := 0o027)
    try:
        more = ("trainer.profile_steps=1", "trainer.warmup_measurement_steps=1", "logger.wandb.mode=offline")
        cache = tmp_path / "cache"
        run = fitted(last_of_each([*text, *more, f"data.cache_dir={cache}"])).directory.path
        export(load_trained(run), tmp_path / "out")
    finally:
        os.umask(before)
    places = [path for place in (run, cache, tmp_path / "out") for path in (place, *place.rglob("*"))]
    files = [path for path in places if path.is_file() and "wandb" not in path.parts]
    assert {"model.safetensors", "state.json", "train.log", "trace.json.gz"} <= {path.name for path in files}
    wrong = {str(path): oct(path.stat().st_mode) for path in files if path.stat().st_mode & 0o777 != 0o666 & ~umask}
    assert not wrong
    folders = {path.stat().st_mode & 0o777 for path in places if path.is_dir() and "wandb" not in path.parts}
    assert folders == {0o777 & ~umask}


def test_the_commands_that_export_names_load_the_model(run_path, tmp_path, command_here, monkeypatch):
    out = tmp_path / "it's out"
    done = command_here("scripts/export.py", f"checkpoint={run_path}", f"output={out}")
    assert done.returncode == 0, done.stderr
    here, elsewhere, what_it_takes = (line.strip() for line in done.stdout.splitlines()[1:])
    assert "need a GPU" in what_it_takes
    for command in (here, elsewhere):
        *imports, call = command.split("; ")
        exec("; ".join(imports), names := {})
        assert eval(call, names)(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 512)
    assert "fla" in names
    monkeypatch.setattr(transformers.models.auto.configuration_auto.CONFIG_MAPPING, "_extra_content", {})
    with pytest.raises(ValueError, match="not recognize"):  # as where nobody has imported it
        eval(call, names)
    assert not load_trained(out, "cpu").model.training
    assert load_trained(str(run_path)).config is not None


def _export_to_a_small_disk(run: Path, disk: Path, kept: Path) -> None:
    """In another process: export to a file system that is too small for the weights."""
    small_disk.mount(disk, "64k")
    try:
        export(load_trained(str(run), CPU), disk / "out")
    except StorageError as error:
        kept.write_text(f"{error.exit_code} {error.cause} {[path.name for path in disk.iterdir()]}")


def test_a_full_disk_ends_an_export_with_its_cause_and_leaves_nothing(run_path, tmp_path):
    (tmp_path / "disk").mkdir()
    process = start(_export_to_a_small_disk, run_path, tmp_path / "disk", tmp_path / "kept")
    small_disk.end(process)
    assert process.exitcode == 0
    words = (tmp_path / "kept").read_text()
    assert words.startswith(f"7 {tmp_path}/disk/out cannot be written (")
    assert "No space left" in words
    assert words.endswith("[]"), "nothing is left behind"

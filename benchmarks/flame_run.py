"""Train a small GLA with flame, unmodified, with each loss: `python benchmarks/flame_run.py flame=PATH`.

flame (github.com/fla-org/flame) trains FLA's models on torchtitan. Every loss is one run of `flame.train` with the same
seed, texts and tokenizer, so that the runs differ by the loss alone. Python's own library serves as text, because every
machine has it. flame needs torchtitan 0.1, torchdata and datasets 3.6, and `flame` names a clone of its repository.
FLA's kernels take the choices that linrnn stores for this GPU.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from linrnn.config.compose import add_command
from linrnn.config.schema import option
from linrnn.core.errors import ConfigError, LinrnnError
from linrnn.core.files import write_text
from linrnn.core.output import say
from linrnn.report.plot_style import WIDTH, in_words, legend_below, looks, subplots

LAST_LINES = 60  # of a run that fails; half of them are the launcher's
SWITCH = "flame_cce"  # the module that a user starts in place of flame.train
SUFFIXES = (".py", ".c", ".h", ".md", ".txt")
CHECK = "is_registered_in_fla:"
SWITCH_SOURCE = f"""import runpy
from cce_kernels.huggingface.fla_backend import is_registered_in_fla, register_in_fla
register_in_fla()
print("{CHECK}", is_registered_in_fla())
runpy.run_module("flame.train", run_name="__main__", alter_sys=True)
"""
START = "flame_start"  # FLA alone would first tune its kernels, for more than seven minutes in every run
START_SOURCE = """import runpy, sys
import fla.models
from linrnn.models import tuning
tuning.use("first")
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m", START]  # as flame's train.sh, on one GPU
# Which module is started, and whether FLA's fused loss is on: off in all of flame's own configurations.
LOSSES = {"fla": ("flame.train", True), "cce_kahan": (SWITCH, True), "fla_logits": ("flame.train", False)}


@dataclass
class BenchConfig(common.Keys):
    """Keys of the command line."""

    flame: str = option("flame", "a clone of flame's repository", path="read")
    losses: list[str] = option([*LOSSES], f"in this order: {' | '.join(LOSSES)}")
    steps: int = option(300, "of the optimizer", minimum=2)
    warmup_steps: int = option(30, "of the learning rate", minimum=1)
    lr: float = option(1e-3, "the highest learning rate")
    batch_size: int = option(16, "sequences of a step", minimum=1)
    seq_len: int = option(512, "tokens of a sequence", minimum=16)
    hidden_size: int = option(256, "of GLA, which has 4 heads", minimum=64)
    layers: int = option(2, "blocks of GLA", minimum=1)
    vocab_size: int = option(32000, "entries of the tokenizer, which learns them from the texts", minimum=300)
    texts: str | None = option(
        None, f"a folder with texts ({' '.join(SUFFIXES)}); null: Python's own library", path="read"
    )
    text_mib: int = option(8, "of texts at most", minimum=1)


add_command("bench_flame", BenchConfig)


@dataclass
class Row:
    """One step of a run, as flame logs it."""

    loss: str
    run: str  # id in runs.jsonl
    step: int
    nats: float  # training loss of the step
    tokens_per_second: float
    peak_gib: float  # memory that tensors held at most during the step
    grad_norm: float  # before clipping
    status: str = "ok"


TAGS = {
    "nats": "loss_metrics/global_avg_loss",
    "tokens_per_second": "throughput(tps)",
    "peak_gib": "memory/max_active(GiB)",
    "grad_norm": "optimizer/grad_norm",
}


# -------------------------------------------------------------------------------------------------------- measuring
def prepare(config: BenchConfig, folder: Path) -> None:
    """Write what flame reads: texts.jsonl, a tokenizer, two configurations of the model, and the switch."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts, size = [], 0
    for path in sorted(Path(config.texts or sysconfig.get_paths()["stdlib"]).rglob("*.*")):
        if path.suffix in SUFFIXES and not {"site-packages", "dist-packages"} & {*path.parts}:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
            size += len(texts[-1])
            if size >= config.text_mib << 20:
                break
    write_text(folder / "texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = bytes_, decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=config.vocab_size, special_tokens=[*special.values()], initial_alphabet=bytes_.alphabet(),
        show_progress=False,
    ))  # fmt: skip
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "tokenizer")
    model = {
        "model_type": "gla", "hidden_size": config.hidden_size, "num_hidden_layers": config.layers, "num_heads": 4,
        "expand_k": 1, "expand_v": 2, "vocab_size": config.vocab_size, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
    }  # fmt: skip
    for fused in (False, True):
        switches = {"fuse_cross_entropy": not fused, "fuse_linear_cross_entropy": fused}
        write_text(folder / f"gla_{'fused' if fused else 'logits'}.json", json.dumps({**model, **switches}))
    write_text(folder / f"{SWITCH}.py", SWITCH_SOURCE)
    write_text(folder / f"{START}.py", START_SOURCE)


def write_config(config: BenchConfig, loss: str, source: Path, folder: Path) -> Path:
    """flame/models/fla.toml with the changes of a run, in a file of the same form. Returns its path."""
    model, length = folder / f"gla_{'fused' if LOSSES[loss][1] else 'logits'}.json", config.seq_len
    sections = tomllib.loads((source / "flame" / "models" / "fla.toml").read_text(encoding="utf-8"))
    sections["job"] |= {"dump_folder": str(folder / loss)}
    sections["model"] |= {"config": str(model), "tokenizer_path": str(folder / "tokenizer")}
    sections["training"] |= {
        "dataset": "json", "data_files": str(folder / "texts.jsonl"), "dataset_split": "train", "num_workers": 1,
        "steps": config.steps, "batch_size": config.batch_size, "seq_len": length, "context_len": length,
    }  # fmt: skip
    sections["optimizer"] |= {"lr": config.lr}
    sections["lr_scheduler"] |= {"warmup_steps": config.warmup_steps}
    sections["metrics"] |= {"log_freq": 1, "enable_wandb": False, "enable_tensorboard": True}
    sections["checkpoint"] |= {"enable_checkpoint": False}
    sections["profiling"] |= {"enable_profiling": False}
    lines = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path = folder / f"{loss}.toml"
    write_text(path, "\n".join([*lines, ""]))
    return path


def run_benchmark(config: BenchConfig) -> list[Row]:
    """Train with every loss. A loss's rows are written when its run has ended."""
    source = Path(config.flame).resolve()
    if not (source / "flame" / "train.py").exists():
        raise ConfigError(f"flame: {source} holds no flame/train.py", "git clone https://github.com/fla-org/flame")
    common.check_known("losses", config.losses, [*LOSSES])
    record, measured = common.Record(config, "bench_flame"), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(config, folder)
        paths = os.pathsep.join([name, str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
        for loss in config.losses:
            path, log = write_config(config, loss, source, folder), record.directory / f"{loss}.log"
            say(f"{loss}: flame trains, its output goes to {log}")
            with log.open("w", encoding="utf-8") as output:
                exit_code = subprocess.run(
                    [*LAUNCH, LOSSES[loss][0], "--job.config_file", str(path)], cwd=source, stdout=output,
                    stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
                ).returncode  # fmt: skip
            printed = log.read_text(encoding="utf-8")
            if exit_code or (f"{CHECK} True" in printed) != (loss == "cce_kahan"):
                say("\n".join(printed.splitlines()[-LAST_LINES:]))
                raise LinrnnError(f"losses: flame's run with {loss} failed", f"mend what {log} names")
            rows = logged(folder / loss / "tb", loss, record.id)
            record.add(*rows)
            measured += rows
            say(f"{loss}: {rows[0].nats:.4f} nats at step 1, {rows[-1].nats:.4f} at step {rows[-1].step}")
    return measured


def logged(folder: Path, loss: str, run_id: str) -> list[Row]:
    """The steps that flame logged for TensorBoard below a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [events] = folder.rglob("events.out.tfevents.*")
    of = EventAccumulator(str(events), size_guidance={"scalars": 0})
    of.Reload()
    series = {name: [event.value for event in of.Scalars(tag)] for name, tag in TAGS.items()}
    steps = [event.step for event in of.Scalars(TAGS["nats"])]
    return [Row(loss, run_id, step, **{name: series[name][i] for name in TAGS}) for i, step in enumerate(steps)]


# --------------------------------------------------------------------------------------------------------- the page
@dataclass
class Summary:
    """A run in one line. Speed and memory are of its second half, where every kernel is compiled."""

    label: str
    run: str
    last: float  # mean of the last tenth's losses, nats
    difference: float  # to FLA's fused loss in the last tenth, mean, nats
    tokens_per_second: float  # median
    peak_gib: float
    status: str = "ok"


COLUMNS: common.Columns = {
    "loss": lambda row: f"`{row.label}`",
    "last loss, nats": "last:.4f",
    "minus `fla`'s, nats": "difference:.4f",
    "tokens/s": "tokens_per_second:,.0f",
    "peak, GiB": "peak_gib:.2f",
}


def summary(rows: list[Row], fla: dict[int, float]) -> Summary:
    """A run in one line, beside the losses of FLA's run by step."""
    half, tail = rows[len(rows) // 2 :], rows[-max(1, len(rows) // 10) :]
    return Summary(
        rows[0].loss, rows[0].run, statistics.fmean(row.nats for row in tail),
        statistics.fmean(row.nats - fla.get(row.step, math.nan) for row in tail),
        statistics.median(row.tokens_per_second for row in half), max(row.peak_gib for row in half),
    )  # fmt: skip


def write_report(directory: Path) -> list[Path]:
    """Write flame.md and flame.png: loss curves, and below them the differences to FLA's fused loss."""
    rows = common.last_rows(directory, Row, key=lambda row: (row.loss, row.step))
    runs = {own[0].loss: own for own in common.grouped(rows, key=lambda row: row.loss)}
    fla = {row.step: row.nats for row in runs.get("fla", [])}
    lines, found, shown = [summary(own, fla) for own in runs.values()], looks(runs), {}
    figure, (above, below) = subplots(2, 1, sharex=True, figsize=(WIDTH, 5.5))
    for loss, own in runs.items():
        look = {"color": found[loss].colour, "linewidth": 1}
        [shown[in_words(loss)]] = above.plot([row.step for row in own], [row.nats for row in own], **look)
        both = [row for row in own if row.step in fla]
        below.plot([row.step for row in both], [row.nats - fla[row.step] for row in both], **look)
    above.set_ylabel("training loss, nats")
    below.set(ylabel="minus FLA's loss, nats", xlabel="step")
    gaps = [
        f": {abs(line.difference):.2g} nats apart at the end" for line in lines if line.label == "cce_kahan" and fla
    ]
    figure.suptitle("flame with FLA's losses and with ours" + "".join(gaps))
    legend_below(figure, shown)
    title = "flame's training loop, one loss a run"
    return common.write_report(directory, "flame", title, {"Runs": lines}, COLUMNS, {"flame": figure})


if __name__ == "__main__":
    common.run("bench_flame", __doc__, run_benchmark, write_report)

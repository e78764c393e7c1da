"""Wrong command lines: each is answered in two lines, the cause and what to write instead, with exit code 2."""

import subprocess
import sys

import pytest

from linrnn.config.cli import run

LINES = [
    # An option that a group does not have: the nearest ones, then all.
    ("train", "model=gal", "model=gal: there is no such model", "nearest: gla, gated_deltanet"),
    ("train", "model=fla model.config=deltnet", "FLA has no such model", "nearest: delta_net"),
    ("train", "loss=cce_kahn", "loss=cce_kahn: there is no such loss", "nearest: cce_kahan"),
    ("train", "experiment=mvee", "experiment=mvee: there is no such experiment", "nearest: mve"),
    ("train", "data=null", "data=null: there is no such data", "all: fineweb_edu, markov"),
    ("run_sweep", "sweep=nope", "sweep=nope: there is no such sweep", "nearest: "),
    ("evaluate", "checkpoint=x loss=standrd", "there is no such loss", "nearest: standard"),
    # What is no name of an option.
    ("train", "model==gla", "model==gla: options are names", "model=NAME"),
    ("train", "model=gla,kda", "options are names", "scripts/sweep.py takes several"),
    ("train", "trainer={max_steps:3}", "options are names", "trainer=NAME"),
    ("train", "model=gla model=kda", "model is given twice (gla, kda)", "keep one"),
    # A key that is not there: the nearest ones, and what its owner has.
    ("train", "experimnt=mve", "experimnt: there is no such key", "nearest: experiment=…"),
    ("train", "modl=gla", "modl: there is no such key", "nearest: model=…"),
    ("train", "trainr.max_steps=1", "trainr.max_steps: there is no such key", "nearest: trainer.max_steps"),
    ("train", "trainer.batchsize=4", "trainer.batchsize: there is no such key", "trainer has: max_steps, max_tokens"),
    ("train", "optimizer.learning_rate=1", "optimizer.learning_rate", "nearest: optimizer.lr"),
    ("train", "batch_size=3", "batch_size: there is no such key", "nearest: trainer.batch_size"),
    ("train", "logger.wandb={mod:offline}", "logger.wandb.mod: there is no such key", "nearest: logger.wandb.mode"),
    ("train", "size.mixers.gla.heads=3", "there is no such key", "nearest: size.mixers.gla.num_heads"),
    ("train", "++data.more=1", "data.more: there is no such key", "data has: name, cache_dir"),
    ("train", "seed.x=1", "seed.x: there is no such key", "nearest: seed"),
    ("evaluate", "checkpont=x", "checkpont: there is no such key", "nearest: checkpoint"),
    ("find_max_batch", "probes=3", "probes: there is no such key", "max_probes=…, a key of this command"),
    ("run_sweep", "sweep=mve job=2", "job: there is no such key", "jobs=…, a key of this command"),
    ("run_sweep", "sweep=mve sweep.ranks=0", "sweep.ranks=0 is below the minimum", "sweep.ranks=1 or more"),
    ("run_sweep", "sweep=mve sweep.rank=2", "sweep.rank: there is no such key", "nearest: sweep.ranks"),
    # A key of another option.
    ("train", "loss=standard loss.filter_eps=1", "filter_eps: there is no such key", "an option of loss=cce_filter"),
    ("train", "data=text data.path=x data.branching=3", "data.branching", "it is an option of data=markov; data has: "),
    ("train", "model=gla model.attention_every=2", "model.attention_every", "model=fla"),
    ("train", "schedule=constant schedule.min_lr_ratio=1", "schedule.min_lr_ratio", "schedule=cosine, schedule=linear"),
    ("train", "experiment=phase1 data=markov", "experiment/phase1.yaml: data.max_tokens", "without experiment"),
    ("evaluate", "checkpoint=x loss.filter_eps=1", "a key of a group that is not chosen", "first choose loss=NAME"),
    # A value that must be given.
    ("train", "data=text", "data.path must be given", "add data.path=…"),
    ("export", "checkpoint=x", "output must be given", "add output=…"),
    # A value of another type.
    ("train", "trainer.batch_size=two", "batch_size=two is not a whole number", "give trainer.batch_size a whole"),
    ("train", "trainer.max_steps=1.5", "trainer.max_steps=1.5 is not a whole number", "give trainer.max_steps a whole"),
    ("train", "seed=", "seed= is not a whole number", "give seed a whole number"),
    ("train", "data.verify=maybe", "data.verify=maybe is not true or false", "true or false"),
    ("train", "logger.wandb.tags=a,b", "logger.wandb.tags is a list", "write a list as logger.wandb.tags=[a,b]"),
    ("generate", "checkpoint=x prompt_tokens=[a]", "prompt_tokens=[a]: Value 'a' of type 'str'", "--help"),
    ("train", "seed=1,2", "seed=1,2: seed takes one value", "scripts/sweep.py"),
    # A value out of bounds.
    ("train", "trainer.seq_len=1", "trainer.seq_len=1 is below the minimum of 2", "use trainer.seq_len=2 or more"),
    ("train", "optimizer.beta1=1.5", "is above the maximum of 1", "use optimizer.beta1=1 or less"),
    ("train", "device=gpu", "device=gpu is not one of auto, cpu, cuda", "one of these values"),
    ("train", "trainer.resume=nver", "is not one of auto, never, must", "use trainer.resume=never"),
    ("train", "trainer.precision=fp16", "is not one of auto, fp32", "use trainer.precision=bf16_autocast"),
    ("train", "optimizer.lr=nan", "is not a finite number", "finite"),
    ("train", "logger.console_every_seconds=inf", "is not a finite number", "finite"),
    ("train", "seed=99999999999999999999", "does not fit in 64 bits", "2**63"),
    ("train", "results_dir=", "results_dir is empty", "name a path"),
    ("train", "run_name=../../x", "is no plain name", "no dot at its start"),
    # What is no override, or more than one.
    ("train", "batch_size", "'batch_size' cannot be read", "key=value"),
    ("evaluate", "/tmp", "'/tmp' cannot be read", "a path needs its key: KEY=/tmp"),
    ("train", "--model gla", "--model: there is no such option", "write model=gla"),
    ("train", "--batch-size=8", "--batch-size=8: there is no such option", "write trainer.batch_size=8"),
    ("train", "-m model=gla,kda", "-m: there is no such option", "scripts/sweep.py"),
    ("train", "~dry_run", "~dry_run: no key can be removed", "leave it out"),
    ("breakdown", "gpu=h100", "gpu: this command has no such key", "train.py"),
    ("train", "seed=[1", "cannot be read", "for the shell"),
    ("train", "seed=it's", "cannot be read", "key=value"),
    ("generate", "checkpoint=x prompt=hello world", "'world' cannot be read", "a value with spaces needs quotes"),
    # What no configuration may do.
    ("train", "hydra.run.dir=/tmp/x", "no keys of Hydra's own", "scripts/sweep.py"),
    ("train", "+hydra.callbacks.x._target_=subprocess.Popen", "no keys of Hydra's own", "leave it out"),
    ("find_max_batch", "hydra/launcher=submitit_local", "no keys of Hydra's own", "cluster=slurm"),
    ("run_sweep", "sweep=mve cluster=slrum", "cluster=slrum is not one of none, slurm, local", "use cluster=slurm"),
    ("train", "run_name=${oc.env:HOME}", "values are not computed", "without ${"),
]


@pytest.mark.parametrize(("command", "line", "cause", "remedy"), LINES, ids=[f"{c} {line}" for c, line, *_ in LINES])
def test_answered_with_its_cause_and_what_to_write_instead(command, line, cause, remedy, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["command.py", *line.split()])
    with pytest.raises(SystemExit) as stop:
        run(lambda *configs: None, command, makes_runs=command in ("run_sweep", "find_max_batch", "breakdown"))
    assert stop.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert cause in first
    assert second.startswith("  -> ")
    assert remedy in second


def test_help_is_printed_before_torch_or_hydra_is_imported():
    program = (
        "import sys; sys.argv = ['train.py', 'loss=liger', '--help']\n"
        "from linrnn.config.cli import run\n"
        "run(lambda config: None)\n"
        "print({'torch', 'hydra', 'omegaconf'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")
    assert "\naccumulate: native" in done.stdout


def test_help_fills_its_lines(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    run(lambda config: None, "train", "What it is.\n\nA sentence that a docstring breaks,\nof two\nlines.\n")
    told = capsys.readouterr().out
    assert told.startswith("What it is.\n\nA sentence that a docstring breaks, of two lines.\n\nusage: ")
    assert "| liger |\n" + " " * 15 + "standard" in told

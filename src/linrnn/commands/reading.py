"""The commands that read a trained model: evaluate, export, generate."""

import dataclasses
from pathlib import Path
from typing import Any

from linrnn.config import data_for, read_config
from linrnn.config.schema import EvaluateConfig, ExportConfig, GenerateConfig
from linrnn.core.files import write_json
from linrnn.core.output import say


def evaluate(config: EvaluateConfig) -> None:
    """Compute a checkpoint's loss, perplexity and bits per byte, or lm-eval's tasks."""
    if config.output:
        Path(config.output).parent.mkdir(parents=True, exist_ok=True)  # fails before the work
    results = _evaluate_tasks(config) if config.tasks else _evaluate_loss(config)
    if config.output:
        write_json(Path(config.output), {"checkpoint": config.checkpoint, **results})


def _evaluate_tasks(config: EvaluateConfig) -> dict[str, Any]:
    """Print lm-eval's table. Returns its figures."""
    from linrnn.inference.load import load_trained
    from linrnn.inference.tasks import evaluate_tasks, find_tasks
    from linrnn.models import tuning
    from linrnn.training.runtime import resolve_device

    manager = find_tasks(config)
    trained = load_trained(config.checkpoint, resolve_device(config.device))
    with tuning.show_progress():
        results = evaluate_tasks(trained, config, manager)
    from lm_eval.utils import make_table

    print(f"{trained.source}\n{make_table(results)}")
    return {"tasks": results["results"], **{key: results[key] for key in ("versions", "n-shot", "n-samples")}}


def _evaluate_loss(config: EvaluateConfig) -> dict[str, Any]:
    """Print loss, perplexity and bits per byte on a split of the data. Returns them by metric name."""
    from linrnn.costs import loss_memory
    from linrnn.data import BatchesOnce
    from linrnn.inference.load import directory_of_tokenizer, open_data, read_model
    from linrnn.losses import build_loss
    from linrnn.models import tuning
    from linrnn.models.language_model import compute_dtype, parameter_dtype
    from linrnn.training import checkpoint
    from linrnn.training.evaluation import evaluate
    from linrnn.training.plan import check_reading_fits, make_plan
    from linrnn.training.starting import vocab_size

    directory = checkpoint.required("checkpoint", config.checkpoint)
    trained = read_config(directory / "config.yaml")
    trainer = dataclasses.replace(
        trained.trainer,
        batch_size=config.batch_size or trained.trainer.batch_size,
        seq_len=config.seq_len or trained.trainer.seq_len,
    )
    loss = (config.loss or trained.loss).plain()
    here = dataclasses.replace(
        trained,
        data=data_for(trained.data, config.data, directory_of_tokenizer(directory)),
        loss=dataclasses.replace(loss, softcap=loss.softcap or trained.loss.softcap),
        trainer=trainer,
        device=config.device,
    )
    plan = make_plan(here)
    arch = plan.architecture(vocab_size(directory))
    shape = (trainer.batch_size * trainer.seq_len, arch.hidden_size, arch.vocab_size)
    of_loss = loss_memory(here.loss, *shape, compute_dtype(plan.precision).itemsize)
    check_reading_fits(arch, plan.device, of_loss[0] if of_loss else 0)
    data = open_data(directory, trained.data, here.data)
    model = read_model(directory, arch, plan.device, parameter_dtype(plan.precision))
    shards = data.valid if config.split == "valid" else data.train
    with tuning.show_progress():
        evaluation = evaluate(
            model,
            build_loss(here.loss, device=plan.device),
            BatchesOnce(
                shards,
                seq_len=trainer.seq_len,
                batch_size=trainer.batch_size,
                max_tokens=config.max_tokens,
                reset_at_document=here.data.reset_at_document,
                token_bytes=data.token_bytes(shards, print),
            ),
            precision=plan.precision,
            device=plan.device,
        )
    print(f"{directory}\n{config.split} split of {data.description}\n{evaluation}")
    return {"split": config.split, **evaluation.metrics()}


def export(config: ExportConfig) -> None:
    """Export a model as a Hugging Face directory."""
    import torch

    from linrnn.inference.export import check_output, export
    from linrnn.inference.load import load_trained

    check_output(Path(config.output))  # before the model is loaded, which takes longer
    trained = load_trained(config.checkpoint, torch.device("cpu"))
    export(trained, Path(config.output))
    tokenizer = "with its tokenizer" if trained.tokenizer else "without a tokenizer (the run recorded none)"
    print(f"wrote {config.output}, {tokenizer}, from {trained.source}; load it with")
    print(f"  from linrnn.inference import load_trained; load_trained({config.output!r}).model  # CPU or GPU")
    print(f"  import fla, transformers; transformers.AutoModelForCausalLM.from_pretrained({config.output!r})")
    flash = ", and the flash_attn package" * (trained.model.config.model_type == "transformer")
    print(f"    # without linrnn; FLA's kernels need a GPU{flash}")


def generate(config: GenerateConfig) -> None:
    """Generate text from a model."""
    from linrnn.inference.generate import Printer, prompts, samples
    from linrnn.inference.load import load_trained
    from linrnn.models import tuning
    from linrnn.training.runtime import resolve_device

    trained = load_trained(config.checkpoint, resolve_device(config.device))
    printer = Printer(trained)
    with tuning.show_progress():
        for one in prompts(config):
            for number, _ in enumerate(samples(trained, one, printer), start=1):
                if number < one.n_samples:
                    say("---")

"""The loss of a checkpoint on a split of data: its run's own, or other data."""

import dataclasses
from typing import Any

from linrnn.config import data_for, read_config
from linrnn.config.schema import EvaluateConfig
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


def evaluate_loss(config: EvaluateConfig) -> dict[str, Any]:
    """Print loss, perplexity and bits per byte. Returns them by metric name.

    Raises:
        ConfigError: there is no checkpoint, or the data's tokens are not the model's.
        DataError: checkpoint or data is damaged.
        UnsupportedError: the loss or the model cannot run here, or does not fit into memory.
    """
    directory = checkpoint.required("checkpoint", config.checkpoint)
    trained = read_config(directory / checkpoint.CONFIG)
    trainer = dataclasses.replace(
        trained.trainer,
        batch_size=config.batch_size or trained.trainer.batch_size,
        seq_len=config.seq_len or trained.trainer.seq_len,
    )
    loss = (config.loss or trained.loss).for_validation()
    here = dataclasses.replace(
        trained,
        data=data_for(trained.data, config.data, directory_of_tokenizer(directory)),
        loss=dataclasses.replace(loss, softcap=loss.softcap or trained.loss.softcap),
        trainer=trainer,
        device=config.device,
    )
    plan = make_plan(here)
    arch = plan.architecture(vocab_size(directory))
    n_tokens, element = trainer.batch_size * trainer.seq_len, compute_dtype(plan.precision).itemsize
    passes = loss_memory(here.loss, n_tokens, arch.hidden_size, arch.vocab_size, element)
    check_reading_fits(arch, plan.device, passes[0] if passes else 0)
    data = open_data(directory, trained.data, here.data)
    model = read_model(directory, arch, plan.device, parameter_dtype(plan.precision))
    batches = BatchesOnce(
        data.valid if config.split == "valid" else data.train,
        seq_len=trainer.seq_len,
        batch_size=trainer.batch_size,
        max_tokens=config.max_tokens,
        reset_at_document=here.data.reset_at_document,
        tokenizer=data.tokenizer,
    )
    with tuning.show_progress():
        loss_backend = build_loss(here.loss, device=plan.device)
        evaluation = evaluate(model, loss_backend, batches, precision=plan.precision, device=plan.device)
    print(f"{directory}\n{config.split} split of {data.description}\n{evaluation}")
    return {"split": config.split, **evaluation.metrics()}

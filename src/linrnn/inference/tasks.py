"""Tasks of lm-eval (EleutherAI's lm-evaluation-harness), which `pip install 'linrnn[eval]'` installs.

lm-eval computes with the loaded model itself, on a CPU too, and with a softcap where the run has one.
"""

import difflib
import tempfile
from pathlib import Path
from typing import Any

from linrnn.config.schema import EvaluateConfig
from linrnn.core.errors import ConfigError, DataError, first_line
from linrnn.core.files import write_text
from linrnn.core.requirements import require_package, version_of
from linrnn.inference.load import Trained, load_trained
from linrnn.models import tuning


def _find_tasks(config: EvaluateConfig) -> Any:
    """lm-eval's TaskManager, after a check that it has all `tasks`. Nothing is downloaded, no model is needed.

    Raises:
        UnsupportedError: lm-eval is not installed.
        ConfigError: there is no such task or folder, or a key belongs to the loss of a run.
    """
    require_package("lm_eval.models.huggingface", "lm-eval", f"tasks={config.tasks[0]}", "linrnn[eval]")
    from lm_eval.tasks import TaskManager

    if config.data or config.loss or config.max_tokens:
        cause = "tasks bring their own data and measures, so data, loss and max_tokens would change nothing"
        raise ConfigError(cause, "leave them out; tasks_limit=… takes fewer examples")
    if config.tasks_path and not Path(config.tasks_path).is_dir():
        raise ConfigError(f"tasks_path={config.tasks_path} is no folder", "name a folder with YAML files of tasks")
    manager = TaskManager(include_path=config.tasks_path)
    if unknown := [task for task in config.tasks if task not in manager.all_tasks]:
        near = ", ".join(difflib.get_close_matches(unknown[0], manager.all_tasks, n=3, cutoff=0))
        raise ConfigError(
            f"tasks: lm-eval {version_of('lm-eval')} has no {unknown[0]}",
            f"nearest: {near}; for tasks of your own tasks_path=… names the folder of their YAML files",
        )
    return manager


def evaluate_tasks(config: EvaluateConfig) -> dict[str, Any]:
    """Print lm-eval's table of `tasks`. Returns its figures.

    Raises:
        UnsupportedError, ConfigError: as :func:`_find_tasks`.
        ConfigError: the model has no tokenizer.
        DataError: a task's data set cannot be read.
    """
    manager = _find_tasks(config)  # before the model is loaded, which takes longer
    trained = load_trained(config.checkpoint, config.device)
    with tuning.show_progress():
        results = _evaluate(trained, config, manager)
    from lm_eval.utils import make_table

    print(f"{trained.source}\n{make_table(results)}")
    return {"tasks": results["results"], **{key: results[key] for key in ("versions", "n-shot", "n-samples")}}


def _evaluate(trained: Trained, config: EvaluateConfig, manager: Any) -> dict[str, Any]:
    """What lm-eval's `simple_evaluate` returns."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    if trained.tokenizer is None or trained.tokenizer.eos_token is None:
        cause = f"tasks are text, and {trained.source} has no tokenizer with an end token"
        raise ConfigError(cause, "leave tasks out for the loss on the run's own data")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in trained.tokenizer.files().items():
            write_text(Path(folder, name), text)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    length = config.seq_len or (trained.config.trainer.seq_len if trained.config else None)
    sizes = {"batch_size": config.batch_size or 1, "max_length": length}
    model = HFLM(trained.model, backend="causal", tokenizer=tokenizer, **sizes)
    limit = config.tasks_limit
    try:
        return simple_evaluate(model, tasks=config.tasks, limit=limit, task_manager=manager, log_samples=False)
    except OSError as error:  # of `datasets`, the hub and the network
        remedy = "check the connection, or the data files that the task's YAML names"
        raise DataError(f"the data of tasks={config.tasks} cannot be read: {first_line(error)}", remedy) from error

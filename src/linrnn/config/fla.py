"""`model=fla`: find FLA's model by name, or read a config.json. FLA itself is not imported."""

import functools
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from linrnn.config.bounds import nearest
from linrnn.config.schema import FlaModelConfig
from linrnn.core.errors import ConfigError

# Fields of a config.json that say how it was stored, or how FLA's own loss is computed. linrnn decides both.
NOT_READ = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type", "use_cache"),
    *("fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp", "_name_or_path", "return_dict"),
    *("output_hidden_states", "output_attentions", "is_encoder_decoder", "chunk_size_feed_forward", "id2label"),
    *("label2id", "problem_type", "bos_token_id", "eos_token_id", "pad_token_id", "is_decoder"),
}


@functools.cache
def fla_models() -> dict[str, str]:
    """FLA's models: `model_type` to the name of the module in `fla.models`. Empty without FLA."""
    spec = importlib.util.find_spec("fla")
    found = {}
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("models/*/configuration_*.py")):
            text = path.read_text(encoding="utf-8")
            if name := re.search(r"^    model_type\s*=\s*['\"](\w+)['\"]", text, re.MULTILINE):
                found[name[1]] = path.parent.name
    return found


def settle_fla_model(model: FlaModelConfig) -> None:
    """Check `model.config`. A config.json is read: its fields become options, where none is given.

    A run's configuration therefore holds the whole model, and the file may change or vanish.

    Raises:
        ConfigError: there is no such model, or the file cannot be read. The remedy names the nearest models.
    """
    path, given = Path(model.config), model.config
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json":
        try:
            fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            given = str(fields["model_type"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"model.config={model.config}: no config.json with a model_type can be read ({type(error).__name__})",
                "name a config.json in Hugging Face's format, its directory, or one of FLA's models",
            ) from error
        kept = {key: value for key, value in fields.items() if key not in NOT_READ and value is not None}
        model.options = {**kept, **model.options}
    known = sorted(fla_models())
    if known and given not in known:  # without FLA every name stays: linrnn.models.support says that it is missing
        raise ConfigError(
            f"model.config={given}: FLA has no such model, and this is no config.json",
            f"nearest: {', '.join(nearest(given.lower(), known))}; all: {', '.join(known)}",
        )
    model.config = given

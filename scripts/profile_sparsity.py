"""Count softmax entries of trained models above 2^-k: `python scripts/profile_sparsity.py checkpoints=[results/…]`."""

from functools import partial
from pathlib import Path

from linrnn.config.cli import run
from linrnn.config.schema import ProfileSparsityConfig
from linrnn.core.errors import ConfigError


def main(config: ProfileSparsityConfig) -> None:
    import torch

    from linrnn.inference import sparsity
    from linrnn.inference.load import open_reading
    from linrnn.models import tuning

    if not config.checkpoints:
        raise ConfigError("checkpoints=[] names no run", "name runs or checkpoints: checkpoints=[results/default/RUN]")
    profiles = []
    for source in config.checkpoints:
        reading = open_reading("checkpoints", source, config.data, config.device)
        batches = partial(reading.batches, config.max_tokens)
        counts = torch.zeros(reading.vocab_size, dtype=torch.int64)
        for batch in batches():
            counts += torch.bincount(batch.labels[batch.labels >= 0], minlength=reading.vocab_size)
        name = f"{reading.config.model.name} {reading.config.size.name}, {reading.directory.name}"
        with tuning.show_progress():
            profile = sparsity.profile(
                name, reading.model, batches(), counts, precision=reading.precision, device=reading.device
            )
        profiles.append(profile)
        above = profile.share_above["all"][sparsity.PAPER_EXPONENT]
        print(f"{reading.directory}: {100 * above:.4f} % above 2^-12")
    print("wrote " + ", ".join(map(str, sparsity.write(profiles, Path(config.output_dir)))))


if __name__ == "__main__":
    run(main, "profile_sparsity", __doc__)

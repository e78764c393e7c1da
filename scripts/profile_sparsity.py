"""Softmax entries of trained models above 2^-k: `python scripts/profile_sparsity.py checkpoints=[results/…]`."""

import dataclasses
from pathlib import Path

from linrnn.config import read_config
from linrnn.config.cli import run
from linrnn.config.schema import ProfileSparsityConfig


def main(config: ProfileSparsityConfig) -> None:
    import torch

    from linrnn import checkpoint, sparsity
    from linrnn.data import ConsoleProgress, prepare
    from linrnn.errors import ConfigError
    from linrnn.plan import make_plan
    from linrnn.trained import build

    profiles = []
    for source in config.checkpoints:
        directory = checkpoint.resolve(Path(source))
        if directory is None:
            raise ConfigError(
                f"checkpoints: {source} holds no complete checkpoint",
                "name runs' directories or their checkpoints/step_*, as in checkpoints=[results/default/RUN]",
            )
        trained = dataclasses.replace(read_config(directory / "config.yaml"), device=config.device)
        trained = dataclasses.replace(trained, data=config.data or trained.data)
        plan = make_plan(trained)
        data = prepare(trained.data, progress=ConsoleProgress())
        model = build(directory, trained, plan.device)
        model.eval()

        def batches(data=data, trained=trained):
            return data.valid.batches_once(
                seq_len=trained.trainer.seq_len,
                batch_size=trained.trainer.batch_size,
                max_tokens=config.max_tokens,
                reset_at_document=trained.data.reset_at_document,
            )

        counts = torch.zeros(data.vocab_size, dtype=torch.int64)
        for batch in batches():
            counts += torch.bincount(batch.labels[batch.labels >= 0], minlength=data.vocab_size)
        name = f"{trained.model.name} {trained.size.name}, {directory.name}"
        profiles.append(sparsity.profile(name, model, batches(), counts, precision=plan.precision, device=plan.device))
        print(f"{directory}: {100 * profiles[-1].share_above['all'][sparsity.PAPER_EXPONENT]:.4f} % above 2^-12")
    print("wrote " + ", ".join(map(str, sparsity.write(profiles, Path(config.output_dir)))))


if __name__ == "__main__":
    run(main, "profile_sparsity", __doc__)

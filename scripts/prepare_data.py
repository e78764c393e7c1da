"""Tokenise data once, or check prepared data: `python scripts/prepare_data.py data=text data.path=…`."""

from linrnn.config.cli import run
from linrnn.config.schema import Config
from linrnn.core.errors import ConfigError


def main(config: Config) -> int:
    """Prepare `config.data`, read every byte of it again, and print what lies where."""
    if config.dry_run:
        raise ConfigError("dry_run: this command prepares or checks data, it has no forecast", "drop dry_run=true")
    from linrnn.data import ConsoleProgress, prepare

    data = prepare(config.data, progress=ConsoleProgress())
    data.verify()
    print(data.description)
    for name, split in (("training", data.train), ("validation", data.valid)):
        counts = [
            f"{split.n_documents:,} documents",
            f"{split.n_tokens:,} tokens",
            f"{len(split.shards)} shard(s)",
        ]
        if split.n_bytes:
            counts.insert(1, f"{split.n_bytes:,} bytes of text")
        print(f"  {name}: {', '.join(counts)}")
    print(f"  in {data.directory}, every file as its hash in meta.json says")
    return 0


if __name__ == "__main__":
    run(main, description=__doc__ or "")

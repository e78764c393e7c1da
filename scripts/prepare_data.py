"""Tokenise a data set once, or check what is there: `python scripts/prepare_data.py data=text data.path=…`."""

from linrnn.config.cli import run
from linrnn.config.schema import Config
from linrnn.data import ConsoleProgress, prepare


def main(config: Config) -> int:
    """Prepare `config.data`, read every byte of it once more, and say what lies where."""
    data = prepare(config.data, progress=ConsoleProgress())
    data.verify()
    print(data.description)
    for name, split in (("training", data.train), ("validation", data.valid)):
        text = f"{split.n_bytes:,} bytes of text, " if split.n_bytes else ""
        print(
            f"  {name}: {split.n_documents:,} documents, {text}{split.n_tokens:,} tokens, {len(split.shards)} shard(s)"
        )
    print(f"  in {data.directory}, every file as its hash in meta.json says")
    return 0


if __name__ == "__main__":
    run(main, description=__doc__ or "")

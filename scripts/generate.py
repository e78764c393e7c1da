"""Generate text from a model: `python scripts/generate.py checkpoint=results/… prompt="Once upon a time"`."""

from linrnn.config.cli import run
from linrnn.config.schema import GenerateConfig


def main(config: GenerateConfig) -> None:
    from linrnn.inference.generate import readable, samples
    from linrnn.inference.load import load_trained
    from linrnn.models import tuning
    from linrnn.training.runtime import resolve_device

    trained = load_trained(config.checkpoint, resolve_device(config.device))
    with tuning.show_progress():
        for number, (prompt, tokens) in enumerate(samples(trained, config)):
            if number:
                print("---")
            print(readable(trained, prompt + tokens if prompt != [trained.eos_id] else tokens), flush=True)


if __name__ == "__main__":
    run(main, "generate", __doc__)

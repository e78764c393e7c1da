"""Export a model as a Hugging Face directory: `python scripts/export.py checkpoint=results/… output=my_model`."""

from pathlib import Path

from linrnn.config.cli import run
from linrnn.config.schema import ExportConfig


def main(config: ExportConfig) -> None:
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


if __name__ == "__main__":
    run(main, "export", __doc__)

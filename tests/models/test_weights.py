"""A directory gives the weights that transformers would read, to `init_from=` and to `load_trained`, or an error."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from linrnn.config.schema import MixerDims, ModelConfig, SizeConfig
from linrnn.core.errors import DataError
from linrnn.models import LanguageModel, build_model, load_weights, open_pretrained
from linrnn.models.architecture import resolve

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
HEAD, EMBEDDING = "lm_head.weight", "model.embeddings.weight"


def build(seed: int, *, tied: bool) -> LanguageModel:
    size = SizeConfig("tiny", 64, 2, 16, None, tied, {"gla": MixerDims(2, 16, 32)})
    return build_model(resolve(ModelConfig("gla", None), size, vocab_size=96), device="cpu", seed=seed)


def write(directory: Path, name: str, tensors: Tensors) -> None:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / name, {"format": "pt"})


def shard(directory: Path, tensors: Tensors, count: int) -> dict[str, str]:
    """Write the tensors in `count` files. Returns the index's map."""
    index: dict[str, str] = {}
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::count]}
        write(directory, file, part)
        index |= dict.fromkeys(part, file)
    return index


def write_index(directory: Path, index: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def zeros(tensors: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build(0, tied=False).hf.save_pretrained(directory)
    return directory


def from_init_from(directory: Path) -> Tensors:
    model = build(9, tied=False)
    load_weights(model, directory, "here")
    return model.hf.state_dict()


def from_load_trained(directory: Path) -> Tensors:
    state: Tensors = open_pretrained(directory, CPU).state_dict()
    return state


LOADERS = pytest.mark.parametrize("load", [from_init_from, from_load_trained])


def stale_shards(directory: Path, right: Tensors) -> None:
    index = shard(directory, right, 2)
    shard(directory, zeros(right), 3)
    write_index(directory, index)
    (directory / "model.safetensors").unlink()


def linked(directory: Path, right: Tensors) -> None:
    """As in the hub's cache."""
    (directory / "blob").write_bytes((directory / "model.safetensors").read_bytes())
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to("blob")


CHANGES: dict[str, Callable[[Path, Tensors], None]] = {
    "stray": lambda d, right: write(d, "model_old.safetensors", zeros(right)),
    "stale shards": stale_shards,
    "adapter": lambda d, right: write(d, "adapter_model.safetensors", {"base_model.lora_A.weight": torch.ones(2, 2)}),
    "linked": linked,
    "stale pickle": lambda d, right: (d / "pytorch_model.bin").write_bytes(b"not read"),
}


@LOADERS
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_only_the_files_that_belong_to_the_model_are_read(load, change, untied, tmp_path):
    directory = shutil.copytree(untied, tmp_path / "model")
    right = load_file(directory / "model.safetensors")
    change(directory, right)
    found = load(directory)
    assert found.keys() == right.keys()
    assert all(torch.equal(found[name], right[name]) for name in right)


def with_shards(change: Callable[[Path, dict[str, str]], None]) -> Callable[[Path, Tensors], None]:
    def apply(directory: Path, right: Tensors) -> None:
        index = shard(directory, right, 3)
        write_index(directory, index)
        (directory / "model.safetensors").unlink()
        change(directory, index)

    return apply


def whole(change: Callable[[Tensors], Tensors]) -> Callable[[Path, Tensors], None]:
    return lambda directory, right: write(directory, "model.safetensors", change(dict(right)))


def only(name: str, content: str | None = None) -> Callable[[Path, Tensors], None]:
    def apply(directory: Path, right: Tensors) -> None:
        (directory / "model.safetensors").rename(directory / name)
        if content is not None:
            (directory / "model.safetensors.index.json").write_text(content)

    return apply


def poisoned(value: float) -> Callable[[Tensors], Tensors]:
    def apply(right: Tensors) -> Tensors:
        right[EMBEDDING] = right[EMBEDDING].clone()
        right[EMBEDDING][3, 1] = value
        return right

    return apply


@LOADERS
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (with_shards(lambda d, i: (d / "model-00002-of-00003.safetensors").unlink()), "00002-of-00003.*cannot be read"),
        (with_shards(lambda d, i: write_index(d, {**i, "more": "model-00004-of-00003.safetensors"})), "00004.*cannot"),
        (with_shards(lambda d, i: write_index(d, {**i, "more": i[HEAD]})), "cannot be read .*more"),
        (with_shards(lambda d, i: write_index(d, {k: f for k, f in i.items() if k != HEAD})), f"lacks {HEAD}"),
        (with_shards(lambda d, i: write_index(d, {**i, HEAD: i[EMBEDDING]})), f"cannot be read .*{HEAD}"),
        (with_shards(lambda d, i: write_index(d, {HEAD: "../x.safetensors"})), "x.safetensors cannot be read"),
        (with_shards(lambda d, i: (d / "model.safetensors.index.json").unlink()), "neither model.safetensors nor"),
        (whole(lambda right: {k: v for k, v in right.items() if k != HEAD}), f"lacks {HEAD}"),
        (whole(lambda right: {**right, "model.more": torch.ones(2)}), "holds model.more, which"),
        (whole(lambda right: {**right, HEAD: right[HEAD][:-1]}), rf"{HEAD} is \(\d+, \d+\) there and"),
        (whole(poisoned(float("nan"))), f"{EMBEDDING} holds NaN or infinity"),
        (whole(poisoned(float("-inf"))), f"{EMBEDDING} holds NaN or infinity"),
        (whole(lambda right: {**right, HEAD: right[HEAD].to(torch.float8_e4m3fn)}), f"{HEAD} is torch.float8_e4m3fn"),
        (lambda d, right: os.truncate(d / "model.safetensors", 900), "model.safetensors cannot be read"),
        (only("pytorch_model.bin"), "pytorch_model.bin.*pickled"),
        (only("weights.safetensors"), "neither model.safetensors nor"),
    ],
)
def test_weights_that_are_not_whole_are_refused_by_name(load, change, cause, untied, tmp_path):
    directory = shutil.copytree(untied, tmp_path / "model")
    change(directory, load_file(directory / "model.safetensors"))
    with pytest.raises(DataError) as error:
        load(directory)
    assert re.search(cause, f"{error.value.cause} {error.value.remedy}"), f"{error.value.cause} {error.value.remedy}"
    assert "dimensions" not in error.value.remedy


def test_tied_weights_that_differ_are_refused(tmp_path):
    model = build(0, tied=True)
    model.hf.save_pretrained(tmp_path)
    right = load_file(tmp_path / "model.safetensors")
    [kept] = {HEAD, EMBEDDING} & right.keys()
    [other] = {HEAD, EMBEDDING} - right.keys()
    write(tmp_path, "model.safetensors", {**right, other: right[kept].clone()})
    load_weights(model, tmp_path, "here")
    open_pretrained(tmp_path, CPU)
    write(tmp_path, "model.safetensors", {**right, other: right[kept] + 1})
    for load in (lambda: load_weights(model, tmp_path, "here"), lambda: open_pretrained(tmp_path, CPU)):
        with pytest.raises(DataError, match="tied, and differ"):
            load()

"""Dimensions and parameter counts of every model at every size."""

import functools
import runpy
from pathlib import Path

import pytest

from linrnn.config import load_config
from linrnn.config.schema import MixerDims, ModelConfig, SizeConfig
from linrnn.core.errors import ConfigError
from linrnn.models.architecture import MODELS, Architecture, resolve

SIZES = ("smoke", "mve", "350m", "1b3")
ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def load(model: str, size: str) -> tuple[ModelConfig, SizeConfig]:
    config = load_config([f"model={model}", f"size={size}"])
    return config.model, config.size


def architecture(model: str, size: str, vocab_size: int = 512) -> Architecture:
    model_config, size_config = load(model, size)
    return resolve(model_config, size_config, size_config.vocab_size or vocab_size)


@pytest.mark.parametrize("size", SIZES)
def test_bodies_have_equal_depth_and_width_and_parameters_within_three_percent(size):
    architectures = [architecture(model, size) for model in MODELS]
    assert len({(a.num_layers, a.hidden_size, a.vocab_size, a.tie_embeddings) for a in architectures}) == 1
    bodies = [a.body_parameters for a in architectures]
    assert max(bodies) / min(bodies) < 1.03


def test_sizes_are_what_they_are_called():
    mve = architecture("gla", "mve")
    assert (mve.hidden_size, mve.num_layers, mve.num_heads, mve.head_k_dim, mve.head_v_dim) == (256, 2, 4, 64, 128)
    for model in MODELS:
        assert architecture(model, "smoke").n_parameters < 1e6
        assert architecture(model, "mve").n_parameters == pytest.approx(10e6, rel=0.05)
        assert architecture(model, "350m").n_parameters == pytest.approx(350e6, rel=0.03)
        largest = architecture(model, "1b3")
        assert 1.2e9 < largest.body_parameters < 1.3e9
        assert not largest.tie_embeddings
        assert largest.n_parameters == largest.body_parameters + 2 * 128256 * 2048


def size_config(hidden_size: int = 128, per_d2: float = 12, **mixers: MixerDims) -> SizeConfig:
    return SizeConfig("test", hidden_size, 2, per_d2, None, True, mixers)


@pytest.mark.parametrize(
    ("model", "size", "cause"),
    [
        ("gla", size_config(), "gives no heads for model=gla"),
        ("gla", size_config(per_d2=2, gla=MixerDims(2, 32, 64)), "leave no MLP"),
        ("transformer", size_config(transformer=MixerDims(3, 32, 32)), "do not make up the width"),
        ("transformer", size_config(transformer=MixerDims(4, 16, 32)), "do not make up the width"),
        ("kda", size_config(2048, kda=MixerDims(2, 512, 512)), "above 256"),
        ("gated_deltanet", size_config(gated_deltanet=MixerDims(1, 49, 1)), "FLA cannot build it .*integer"),
    ],
)
def test_impossible_dimensions_are_refused_with_a_remedy(model, size, cause):
    with pytest.raises(ConfigError, match=cause) as error:
        resolve(ModelConfig(model, None), size, 512)
    assert error.value.remedy


def test_the_page_of_sizes_holds_the_table_that_the_command_prints(capsys):
    runpy.run_path(str(ROOT / "scripts" / "maintain" / "parameter_table.py"))["main"]()
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "study" / "appendix" / "i_sizes.md").read_text(encoding="utf-8")
    assert page.split("<!-- sizes -->")[1].strip() == printed.strip()

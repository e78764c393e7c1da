"""What a process settles before anything is built."""

import pytest
import torch

from linrnn.config import load_config
from linrnn.training.runtime import prepare_process

knobs = pytest.importorskip("triton").knobs


@pytest.fixture
def cache_unset(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what the test sets is taken back
    monkeypatch.delenv("TRITON_CACHE_DIR")


def test_inductor_is_held_to_tritons_cache(cache_unset):
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    own = knobs.cache.dir
    assert triton_cache_dir(0) != own
    prepare_process(load_config([]), torch.device("cuda"))
    assert knobs.cache.dir == own
    assert triton_cache_dir(0) == own


def test_a_cache_that_the_user_chose_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    prepare_process(load_config([]), torch.device("cuda"))
    assert knobs.cache.dir == str(tmp_path)


@pytest.mark.gpu
def test_compiling_on_a_gpu_does_not_move_tritons_cache(cache_unset):
    own = knobs.cache.dir
    prepare_process(load_config([]), torch.device("cuda"))
    numbers = torch.arange(1000.0, device="cuda")
    compiled = torch.compile(lambda x: (x.sin() + 1).sum(), options={"compile_threads": 1})
    torch.testing.assert_close(compiled(numbers), (numbers.sin() + 1).sum())
    assert knobs.cache.dir == own

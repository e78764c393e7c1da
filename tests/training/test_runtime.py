"""What a process settles before anything is built."""

import pytest
import torch

from linrnn.config import load_config
from linrnn.training.runtime import prepare_process

knobs = pytest.importorskip("triton").knobs


def test_inductor_is_held_to_tritons_cache_or_to_the_user_s(monkeypatch, tmp_path):
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    for own in (None, str(tmp_path)):
        monkeypatch.setenv("TRITON_CACHE_DIR", own or "")  # so that what the test sets is taken back
        if own is None:
            monkeypatch.delenv("TRITON_CACHE_DIR")
            own = knobs.cache.dir
            assert triton_cache_dir(0) != own
        prepare_process(load_config([]), torch.device("cuda"))
        assert knobs.cache.dir == triton_cache_dir(0) == own

"""Names above 80 characters: as many choices as fit, then a hash of all choices."""

import shlex

from linrnn.config import load_config, run_name
from linrnn.runs.summary import names_of_run

LONG = ["trainer.batch_size=3", "trainer.seq_len=777", "optimizer.beta1=0.81", "optimizer.beta2=0.91"]
LONG += ["optimizer.weight_decay=0.123", "schedule.min_lr_ratio=0.2", "trainer.valid_tokens=4321"]


def test_a_long_name_keeps_the_words_that_fit_and_tells_runs_apart() -> None:
    names = [run_name(load_config([*LONG, f"optimizer.eps={eps}"])) for eps in ("1e-7", "1e-6")]
    assert len(set(names)) == 2
    for name in names:
        assert 60 < len(name) <= 80
        assert name.startswith("gla-smoke-cce_kahan-")
        assert "0.81" in name
        assert name.endswith("-s0")


def test_a_summary_lists_every_choice_as_overrides_that_make_the_run() -> None:
    config = load_config(LONG)
    choices = names_of_run(config, run_name(config), world_size=1)["choices"]
    assert load_config(shlex.split(choices)) == config

"""The study's own questions: other losses, changes of the layers."""

import pytest
from made_up_runs import BLOCKS, FLOAT8, five, run, trained

from linrnn.report.runs import Run
from study.changes import changes_of_loss
from study.criteria import FINAL_LOSS, MVE_LOSS
from study.criteria import verdicts as judged


@pytest.mark.parametrize(
    ("change", "against"),
    [
        ({"training": FLOAT8, "model": "gla"}, "gla, bf16"),
        ({"training": BLOCKS, "model": "gla shared_projection_rank=128"}, "gla, full projections"),
    ],
)
def test_a_change_of_the_blocks_is_judged_beside_runs_without_it(change, against):
    bases = [trained("compiled", seed, BLOCKS, 5.0 + seed) for seed in range(6)]
    changed = [trained("compiled", seed, nats=5.03 + seed, **change) for seed in range(5)]
    other = [trained("cce_kahan", seed, nats=7.0, **change) for seed in range(5)]  # with no run beside them
    found = changes_of_loss([*bases, *changed, *other])
    assert [(v.backend, v.against, v.n, v.verdict) for v in found] == 2 * [("compiled", against, 5, "not reached")]
    assert [v.value for v in found] == 2 * [pytest.approx(0.03)]
    assert not changes_of_loss(bases)


def test_compiled_blocks_are_judged_beside_plain_ones_and_beside_no_other_change():
    compiled, float8 = "trainer.compile=blocks trainer.float8=none", "trainer.compile=blocks trainer.float8=blocks"
    plain = [trained("compiled", seed, "trainer.compile=none trainer.float8=none", 5.0 + seed) for seed in range(5)]
    blocks = [trained("compiled", seed, compiled, 5.001 + seed) for seed in range(5)]
    both = [trained("compiled", seed, float8, 5.031 + seed) for seed in range(5)]
    found = [v for v in changes_of_loss([*plain, *blocks, *both]) if v.target == FINAL_LOSS]
    assert [(v.model, v.against, v.value, v.verdict) for v in found] == [
        ("gla, compile=blocks", "gla, plain blocks", pytest.approx(0.001), "reached"),
        ("gla, float8=blocks", "gla, bf16", pytest.approx(0.03), "not reached"),
    ]


def test_ways_of_summing_are_compared_with_compensated_sums_and_with_compiled():
    def way(accumulate: str, nats: float) -> list[Run]:
        options = {"accumulate": accumulate, "workspace_mib": 128}
        return [
            run("cce_kahan", seed=seed, nats=nats, loss_options=options, run_name=f"{accumulate}-{seed}")
            for seed in range(5)
        ]

    runs = [*five("compiled"), *way("kahan", 5.001), *way("fp32", 5.002), *way("bf16", 5.03)]
    found = [v for v in judged(runs) if v.target == MVE_LOSS and v.value is not None]
    kahan = "cce_kahan accumulate=kahan"
    assert {(v.backend, v.against): (v.verdict, v.n) for v in found} == {
        (kahan, "compiled"): ("reached", 5),
        ("cce_kahan accumulate=fp32", "compiled"): ("reached", 5),
        ("cce_kahan accumulate=bf16", "compiled"): ("not reached", 5),
        ("cce_kahan accumulate=fp32", kahan): ("reached", 5),
        ("cce_kahan accumulate=bf16", kahan): ("not reached", 5),
    }
    few = judged([one for one in runs if one.summary["seed"] < 4])
    assert {v.against for v in few} == {"compiled", "standard", None}, "pairs too few to decide are not listed"

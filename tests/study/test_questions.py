"""The study's own questions: rivals of a loss, changes of the blocks, branches of the proposal, crossovers."""

from dataclasses import replace

import pytest
from made_up_runs import BLOCKS, FIVE_SEEDS, FLOAT8, answer, five, run, trained

from linrnn.report.runs import Run
from study.changes import changes_of_loss
from study.criteria import FINAL_LOSS, MVE_LOSS, own_baselines
from study.criteria import verdicts as judged
from study.crossover import crossover_lines
from study.hypotheses import branches


def test_precision_is_lost_only_where_other_exact_losses_stay_closer() -> None:
    def branch(*runs: Run) -> tuple[str, str]:
        (found,) = [(word, figures) for name, word, figures in branches(judged(runs)) if "precision" in name]
        return found

    base, ours, eager = five("compiled"), five("cce_kahan", nats=5.02), five("standard", nats=5.03)
    assert branch(*base, *ours) == ("inconclusive", "at most 0.0200 nats apart, n = 5")
    assert branch(*base, *ours, *eager) == (
        "inconclusive",
        "at most 0.0200 nats apart, other exact losses 0.0300, n = 5",
    )
    assert branch(*base, *ours, *five("standard", nats=5.001))[0] == "holds"
    assert branch(*base, *five("cce_kahan", nats=5.001))[0] == "does not hold"
    assert branch(base[0], ours[0], run("standard", nats=5.001))[0] == "inconclusive", "one seed decides nothing"
    assert branch(*base, *five("cce_kahan", model="transformer", nats=5.02))[0] == "not measured", "it is no linear RNN"
    plain = five("cce_kahan", nats=5.5, loss_options={"accumulate": "bf16"})
    kahan = five("cce_kahan", nats=5.001, loss_options={"accumulate": "kahan"})
    assert branch(*base, *plain, *kahan)[0] == "does not hold"


def test_liger_s_savings_are_compared_model_by_model() -> None:
    gib = {"gla": (10, 5, 6), "kda": (10, 9, 5)}  # compiled, ours, Liger
    runs = [
        run(loss, model=model, gib=size)
        for model, sizes in gib.items()
        for loss, size in zip(("compiled", "cce_kahan", "liger"), sizes, strict=True)
    ]
    assert branches(judged(runs))[2][1:] == (
        "does not hold",
        "at least 80% of the memory that ours saves",
    )


@pytest.mark.parametrize(
    ("change", "against"),
    [
        ({"training": FLOAT8, "model": "gla"}, "gla, bf16"),
        ({"training": BLOCKS, "model": "gla shared_projection_rank=128"}, "gla, full projections"),
    ],
)
def test_a_change_of_the_blocks_is_judged_beside_runs_without_it(change: dict[str, str], against: str) -> None:
    bases = [trained("compiled", seed, BLOCKS, 5.0 + seed) for seed in range(6)]
    changed = [trained("compiled", seed, nats=5.03 + seed, **change) for seed in range(5)]
    other = [trained("cce_kahan", seed, nats=7.0, **change) for seed in range(5)]  # with no run beside them
    found = changes_of_loss([*bases, *changed, *other])
    assert [(v.backend, v.against, v.n, v.verdict) for v in found] == 2 * [("compiled", against, 5, "not reached")]
    assert [v.value for v in found] == 2 * [pytest.approx(0.03)]
    assert not changes_of_loss(bases)


def test_compiled_blocks_are_judged_beside_plain_ones_and_beside_no_other_change() -> None:
    compiled, float8 = "trainer.compile=blocks trainer.float8=none", "trainer.compile=blocks trainer.float8=blocks"
    plain = [trained("compiled", seed, "trainer.compile=none trainer.float8=none", 5.0 + seed) for seed in range(5)]
    blocks = [trained("compiled", seed, compiled, 5.001 + seed) for seed in range(5)]
    both = [trained("compiled", seed, float8, 5.031 + seed) for seed in range(5)]
    found = [v for v in changes_of_loss([*plain, *blocks, *both]) if v.target == FINAL_LOSS]
    assert [(v.model, v.against, v.value, v.verdict) for v in found] == [
        ("gla, compile=blocks", "gla, plain blocks", pytest.approx(0.001), "reached"),
        ("gla, float8=blocks", "gla, bf16", pytest.approx(0.03), "not reached"),
    ]


def test_the_crossover_lies_where_the_ratio_passes_one() -> None:
    speeds = {"compiled": (1000, 500), "cce_kahan": (800, 625), "standard": (500, 250)}  # ratios 1.25 and 0.8
    runs = [
        run(loss, vocab_size=vocab, speed=speed)
        for loss, pair in speeds.items()
        for vocab, speed in zip((32000, 128000), pair, strict=True)
    ]
    assert crossover_lines(runs) == [
        "* gla x cce_kahan: step faster than compiled's above about 64,000 (n = 1: inconclusive)",
        "* gla x standard: step slower than compiled's from 32,000 to 128,000 (n = 1: inconclusive)",
    ]
    layers = {"compiled": (5.0, 20.0), "cce_kahan": (4.0, 19.0)}
    timed = [
        replace(one, summary={**one.summary, "loss_layer_ms": {"forward": ms, "backward": 0.0}})
        for one, ms in zip(runs[:4], [*layers["compiled"], *layers["cce_kahan"]], strict=True)
    ]
    assert crossover_lines(timed) == [
        "* gla x cce_kahan: step faster than compiled's above about 64,000 (n = 1: inconclusive); "
        "loss layer faster than compiled's from 32,000 to 128,000 (n = 1: inconclusive)",
    ]
    assert crossover_lines(runs[:1]) == []


def test_ways_of_summing_are_compared_with_compensated_sums_and_with_compiled() -> None:
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


@pytest.mark.parametrize(
    ("backend", "others", "expected"),
    [
        ("cce_filter filter_c=False", ["compiled", "cce_kahan"], ["cce_kahan"]),
        ("cce_apple", ["cce_kahan accumulate=kahan", "cce_kahan accumulate=bf16"], ["cce_kahan accumulate=kahan"]),
        ("cce_kahan", ["compiled", "cce_kahan"], []),
        ("cce_kahan accumulate=kahan", ["cce_kahan accumulate=kahan", "cce_kahan accumulate=bf16"], []),
        (
            "cce_kahan accumulate=bf16 workspace_mib=8",
            ["cce_kahan accumulate=kahan workspace_mib=8", "cce_kahan accumulate=kahan workspace_mib=64"],
            ["cce_kahan accumulate=kahan workspace_mib=8"],
        ),
        ("liger accumulate=fp32", ["liger accumulate=kahan", "cce_kahan"], []),
    ],
)
def test_filters_are_compared_with_the_exact_loss_and_sums_with_compensated_ones(backend, others, expected) -> None:
    assert own_baselines(backend, others) == expected


def test_a_larger_batch_gives_speed_only_where_searches_found_one() -> None:
    found = judged(FIVE_SEEDS, [answer("compiled", 12, 1000), answer("cce_kahan", 13, 1010)])
    holds = {branch: word for branch, word, _ in branches(found)}
    assert holds["a larger batch does not give speed: the GPU is saturated already"] == "inconclusive", "a probe each"
    no_larger = judged(FIVE_SEEDS, [answer("compiled", 12, 1000), answer("cce_kahan", 12, 1010)])
    assert branches(no_larger)[0][1] == "not measured"

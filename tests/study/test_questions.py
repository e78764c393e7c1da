"""The study's own verdicts: losses of ours beside each other."""

from made_up_runs import five, run

from linrnn.report.runs import Run
from study.criteria import MVE_LOSS
from study.criteria import verdicts as judged


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

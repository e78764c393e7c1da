"""The figures of what runs cost beside their loss: docs/first_step.md and docs/multi_gpu.md."""

import re
import statistics

from blocks import ROOT
from figures import table_of

from linrnn.bench.first_step.rows import read_rows as read_first_steps
from linrnn.bench.parallel.rows import Measured, read
from linrnn.bench.records import read_runs
from linrnn.models.facts import model_in_words
from linrnn.models.tuning.table import read_table
from linrnn.runs.intervals import AT_LEAST, AT_MOST, LEAST_PAIRS, answer, estimate

SIZES = ("smoke", "mve", "350m", "1b3")
DELTANET_350M = ("gated_deltanet", "350m")


def lines_of(page: str) -> list[str]:
    return (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()


def seconds_of_log(name: str) -> list[tuple[list[str], float]]:
    """The words that name each run of a log, and the end of its first step."""
    text = (ROOT / "results" / "log" / "2026-11-26" / name).read_text(encoding="utf-8")
    runs = [line.split(" | ") for line in text.splitlines()[3:]]
    return [(cells[0].split(), float(cells[-1])) for cells in runs]


def test_the_first_steps_are_those_of_logs_and_rows() -> None:
    columns = ("c22efe3", "c69e142", "7d60aaf", "e8795ac")
    ends: dict[tuple[str, str], list[float]] = {}
    for (line, when), seconds in seconds_of_log("first_step_c69e142.txt"):
        ends.setdefault((line, {"before": "c22efe3", "after": "c69e142"}[when]), []).append(seconds)
    second_machine = []
    for (machine, _, model), seconds in seconds_of_log("first_step_7d60aaf.txt"):
        if machine == "first":
            ends.setdefault((f"{model}_1b3", "7d60aaf"), []).append(seconds)
        elif model == "gla":
            second_machine.append(seconds)
    rows = read_first_steps(ROOT / "results" / "bench_first_step" / "nvidia_h100_80gb_hbm3")
    runs = read_runs(ROOT / "results" / "bench_first_step" / "nvidia_h100_80gb_hbm3")
    deltanet = [row for row in rows if row.model == "gated_deltanet"]
    rwkv, *again = [row for row in rows if row.model == "fla"]
    every = [row for row in rows if row.model != "fla"]
    small = [row for row in every if row.size in ("smoke", "mve") or (row.model, row.size) == DELTANET_350M]
    rows = [row for row in every if row.model != "gated_deltanet" and row not in small]
    deltanet = [row for row in deltanet if row not in small]
    for commit, some in (
        ("e8795ac", rows),
        ("ebb5f1b", deltanet),
        ("f150ba1", [rwkv]),
        ("6e702a7", [*small, *again]),
    ):
        assert {runs[row.run]["environment"]["git"]["commit"][:7] for row in some} == {commit}
    for row in rows:
        assert row.tuned == 0
        ends.setdefault((f"{row.model}_{row.size}", "e8795ac"), []).append(row.seconds)

    def cell(line: str, commit: str) -> str:
        if (line, commit) not in ends:
            return "not measured"
        found = estimate(ends[line, commit], ratios=False)
        if found.low is None or commit != columns[-1]:
            return f"{found.value:.1f}"
        return f"{found.value:.1f} ({found.low:.1f} to {found.high:.1f}, n = {found.n})"

    def verdict(line: str) -> str:
        found = estimate(ends.get((line, columns[-1]), [0.0]), ratios=False)
        if found.low is None or found.high is None or found.n < LEAST_PAIRS:
            return "undecided"
        return {True: "**met**", False: "**missed**", None: "undecided"}[answer(found.low, found.high, AT_MOST, 30)]

    log = (ROOT / "results" / "log" / "2026-11-27.md").read_text(encoding="utf-8")
    table = [line.strip("| ").split(" | ") for line in log.splitlines()]
    shown = [cells for cells in table if len(cells) == 7 and cells[0].split()[-1] in ("mve", "350m", "1b3")]
    names = [f"{model}_{size}" for model in ("gla", "kda", "transformer") for size in ("mve", "350m", "1b3")]
    assert [[cells[0], *cells[2:]] for cells in shown] == [
        [f"{model_in_words(name.split('_')[0])} {name.split('_')[1]}", *(cell(name, c) for c in columns), verdict(name)]
        for name in names
    ]
    page_rows = {
        row[0].split(",")[0]: row[1:]
        for row in table_of("../first_step.md", "first step with `cce_kahan` on an H100, s")
    }
    assert len(page_rows) == len({row.model for row in every}) == 4
    for model in {row.model for row in every}:
        of_size = {size: [row.seconds for row in every if (row.model, row.size) == (model, size)] for size in SIZES}
        large = estimate(of_size["1b3"], ratios=False)
        assert [len(seconds) for seconds in of_size.values()] == [1, 1, 1, LEAST_PAIRS]
        assert (large.high or 0) <= 30
        assert max(seconds[0] for size, seconds in of_size.items() if size != "1b3") <= 30
        assert page_rows[model_in_words(model)] == [
            *(f"{of_size[size][0]:.1f}" for size in SIZES[:3]),
            f"{large.value:.1f} ({large.low:.1f} to {large.high:.1f})",
            "**met**",
        ]
    below = [max(ends[name, c]) for name in names for c in columns[1:] if "1b3" not in name and (name, c) in ends]
    assert max(below) <= 30, "every run since c69e142 ended before"
    page = " ".join(" ".join(lines_of("first_step.md")).split())
    found = estimate([row.seconds for row in again], ratios=False)
    assert (found.high or 0) <= 30
    assert (
        f"ended after {found.value:.1f} s ({found.low:.1f} to {found.high:.1f}, n = {found.n}, commit 6e702a7)" in page
    )
    step = rwkv.seconds - (rwkv.at("weights") or 0)
    told = f"it took {rwkv.seconds:.1f} s (n = 1, commit f150ba1): {step:.0f} s of that in the step"
    assert told in page
    assert f"which compiled {rwkv.first} kernels one after another" in page
    found = estimate(ends["gla_1b3", "7d60aaf"], ratios=False)
    log = " ".join(log.split())
    assert f"is the median of five ({found.low:.1f} to {found.high:.1f})" in log
    kda = ends["kda_1b3", "e8795ac"]
    assert f"The five runs of KDA 1b3 took {min(kda):.1f} to {max(kda):.1f} s" in page
    probes = (ROOT / "results/log/2026-11-27/first_steps_of_probes_6556fe3.txt").read_text(encoding="utf-8")
    lines = re.findall(
        r"^(\d) \S+ (\w+) (\w+) (\d+) (\w+): .* ([\d.]+) s after the start.*none tuned here$", probes, re.M
    )
    assert len(lines) == probes.count("step 1 took")
    first_of: dict[str, tuple[str, str, str]] = {}
    for machine, model, loss, batch, _, ended in lines:
        if model == "gated_deltanet":
            first_of.setdefault(machine, (loss, batch, ended))
    assert first_of == {"1": ("cce_kahan", "11", "20.0"), "2": ("liger", "11", "27.5")}
    assert "after 20.0 s with `cce_kahan` on one machine, and after 27.5 s with Liger on the other" in log
    second = [(float(ended), *line) for machine, *line, ended in lines if machine == "2"]
    assert max(second) == (32.0, "gated_deltanet", "liger", "84", "full")
    assert second[0] == (30.4, "kda", "compiled", "64", "full")
    assert "after up to 32.0 s (Gated DeltaNet, 84 sequences, Liger)" in page
    assert "KDA's first took 30.4 s (64 sequences, compiled)" in log
    before = " ".join((ROOT / "results" / "log" / "2026-11-26.md").read_text(encoding="utf-8").split())
    assert "{:.1f}, {:.1f}, {:.1f} and {:.1f} s on a second machine".format(*second_machine) in before
    imported = [row.at("model") or 0 for row in rows]
    assert f"After {min(imported):.0f} to {max(imported):.0f} s the model is built" in page
    gla = ends["gla_1b3", "e8795ac"]
    assert f"here GLA's first took {gla[0]:.1f} s, and KDA's {kda[0]:.1f} s" in page


def efficiencies_in_words(run: Measured, n: int, verdict: str) -> list[str]:
    """The cells of a run's spread steps, each with this verdict on an efficiency of 0.90 from n repeats."""
    cells = []
    for row in run.steps[1:]:
        found = estimate(row.efficiencies, ratios=True)
        assert found.n == n
        assert found.low is not None
        assert found.high is not None
        words = {True: "met", False: "missed", None: "undecided"}
        assert words[answer(found.low, found.high, AT_LEAST, 0.9)] == verdict
        cells.append(f"**{verdict}**: {found.value:.3f} ({found.low:.3f} to {found.high:.3f})")
    return cells


def test_the_efficiencies_with_cuda_graphs_are_met_by_the_rows() -> None:
    runs = read(ROOT / "results/bench_parallel")
    lines = lines_of("multi_gpu.md")
    for part, gathering in (
        ("350m_graph", ""),
        ("350m_graph_kept", " keep_gathered=true blocks_together=4"),
    ):
        [run] = [run for run in runs if f"part={part} " in run.command]
        assert all(row.cuda_graph for row in run.steps)
        alone, cells = run.steps[0], efficiencies_in_words(run, 6, "met")
        assert f"| `cuda_graph=true{gathering}` | {' | '.join(cells)} |" in lines
        assert f"with a CUDA graph, too: {alone.step_ms:.0f} ms a step" in " ".join(lines)
        assert f"commit {run.environment['git']['commit'][:7]}:" in " ".join(lines)
    older = [
        row.step_ms
        for run in runs
        for row in run.steps
        if (run.device, row.size, row.scaling, row.sequences_of_rank) == ("NVIDIA H200", "350m", "alone", 8)
        and not row.cuda_graph
    ]
    assert f"one H200 took {min(older):.0f} to {max(older):.0f} ms in older runs" in " ".join(lines)


def test_the_repeated_efficiencies_are_those_of_the_rows() -> None:
    [run] = [run for run in read(ROOT / "results/bench_parallel") if "part=350m_repeats" in run.command]
    cells = efficiencies_in_words(run, 5, "undecided")
    [line] = [line for line in lines_of("multi_gpu.md") if "n = 5 |" in line]
    assert line.endswith(" | " + " | ".join(cells) + " |")
    text = " ".join(lines_of("multi_gpu.md"))
    alone, fsdp = run.steps[0].times_ms, run.steps[1].efficiencies
    assert f"one GPU alone took {min(alone):.0f} to {max(alone):.0f} ms in the last row" in text
    assert f"reach {min(fsdp[:3]):.2f} to {max(fsdp[:3]):.2f}, and the last two {fsdp[3]:.2f} and {fsdp[4]:.2f}" in (
        text.replace("`fsdp` the first three repeats ", "")
    )


def test_the_first_steps_of_the_h200_are_those_of_its_rows() -> None:
    rows = read_first_steps(ROOT / "results" / "bench_first_step" / "nvidia_h200")
    others = [row for row in rows if row.model == "fla"]
    stored = {(row.model, row.size): row.seconds for row in rows if row.tuned == 0 and row not in others}
    [tuned] = [row for row in rows if row.tuned]
    assert len(stored) == len(rows) - 3 == 12
    page = lines_of("first_step.md")
    rwkv, product = others
    told = f"it took {rwkv.seconds:.1f} s, and Gated DeltaProduct {product.seconds:.1f} s (n = 1, commit 0b1958b)"
    assert told in " ".join(" ".join(page).split())
    on_h100 = read_first_steps(ROOT / "results" / "bench_first_step" / "nvidia_h100_80gb_hbm3")
    again = [row for row in on_h100 if row.model == "fla" and row.at("kernels")]
    built = [
        statistics.median((row.at("kernels") or 0) - (row.at("model") or 0) for row in own) for own in ([rwkv], again)
    ]
    told = "kernels were compiled {:.0f} s after the model was built, and on the H100 {:.0f} s".format(*built)
    assert told in " ".join(" ".join(page).split())
    for model in ("gla", "kda", "transformer"):
        cells = [f"{stored[model, size]:.1f}" for size in ("smoke", "mve", "350m", "1b3")]
        assert f"| {model_in_words(model)} | {' | '.join(cells)} |" in page
    own = stored[tuned.model, tuned.size]
    assert f"the Transformer of `{tuned.size}` took {tuned.seconds:.1f} s in place of {own:.1f}" in " ".join(page)
    log = " ".join((ROOT / "results" / "log" / "2026-11-28.md").read_text(encoding="utf-8").split())
    assert f"ended after {min(stored.values()):.1f} to {max(stored.values()):.1f} s" in log


def test_errors_of_a_wrongly_compiled_kernel_are_those_of_the_rows() -> None:
    rows = (ROOT / "results/log/2026-11-28/chunk_bwd_dqkwg_78689c0.txt").read_text(encoding="utf-8").splitlines()[5:]
    found: dict[tuple[str, ...], set[str]] = {}
    for row in rows:
        key, _, result = row.partition(" | ")
        keys, values, chunk, warps, _, decay = key.split()
        if "fit" not in result:
            found.setdefault((keys, values, chunk, decay, warps), set()).add(result)
    assert all(results == {"error 0.00e+00"} for key, results in found.items() if key[-1] == "2")
    four = {key[:4]: results for key, results in found.items() if key[-1] == "4"}
    log = (ROOT / "results/log/2026-11-28.md").read_text(encoding="utf-8")
    for row in log.splitlines():
        if not (cells := re.fullmatch(r"\| (\d+), (\d+), (\d+)(, without decay)? \| reference \| (.+) \|", row)):
            continue
        *shape, without, said = cells.groups()
        [result] = four.pop((*shape, "0" if without else "1"))
        error = result.removeprefix("error ")
        digits = len(said.partition(".")[2])
        assert said == (result if "illegal" in result else f"error {float(error):.{digits}f}"), row
    rest = sorted(float(result.removeprefix("error ")) for results in four.values() for result in results)
    assert {keys for keys, *_ in four} == {"64"}
    assert f"| 64, 32 to 128, 64 | reference | error {rest[0]:.3f} to {rest[-1]:.3f} |" in log


def test_the_choices_that_two_gpus_share_are_as_many_as_the_page_says() -> None:
    page = " ".join(lines_of("first_step.md"))
    tables = {
        (gpu, triton): read_table(f"NVIDIA {gpu}", triton)
        for gpu in ("H200", "H100 80GB HBM3")
        for triton in ("3.6.0", "3.7.1")
    }
    choices = {
        key: {(name, of): choice for name, entries in table.kernels.items() for of, choice in entries.items()}
        for key, table in tables.items()
        if table is not None
    }
    own, other = (choices[gpu, "3.6.0"] for gpu in ("H200", "H100 80GB HBM3"))
    equal = sum(other.get(key) == choice for key, choice in own.items())
    assert f"With Triton 3.6.0 both tables hold {len(own.keys() & other.keys())} keys, and {equal} of these" in page
    own, other = (choices[gpu, "3.7.1"] for gpu in ("H200", "H100 80GB HBM3"))
    both = own.keys() & other.keys()
    equal = sum(own[key] == other[key] for key in both)
    assert f"With 3.7.1 both hold {len(both)} keys,   and {equal} choices are equal." in page

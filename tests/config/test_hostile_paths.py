"""Directories and files with any printable name: every command reads and writes them."""

from linrnn.config import load_config
from linrnn.report.runs import read_runs

NAME = 'it\'s [mine], a=b {ü} $x 😀 "50%" \\'


def test_a_run_and_what_is_made_of_it_lie_anywhere(small, tmp_path, command):
    here = tmp_path / NAME
    here.mkdir()
    (here / "text, 1.txt").write_text("\n\n".join(f"the cat number {i} sat" for i in range(2000)), encoding="utf-8")
    options = [o for o in small() if not o.startswith(("data.n_", "results_dir=", "data.cache_dir="))]
    options += ["data=text", f"data.path={here}/text, 1.txt", "data.tokenizer_vocab_size=300"]
    options += [f"results_dir={here}/results", f"data.cache_dir={here}/cache"]
    done = command("train.py", *options, "run_name=run")
    assert done.returncode == 0, done.stderr
    run = here / "results" / "default" / "run"
    assert len(read_runs(run.parent)) == 1

    evaluated = command(
        "scripts/evaluate.py", f"checkpoint={run}", f"data.cache_dir={here}/cache", "device=cpu", "max_tokens=100"
    )
    assert evaluated.returncode == 0, evaluated.stderr

    output = load_config([f"checkpoint={run}", f"output={here}/out"], "export").output
    assert command("scripts/export.py", f"checkpoint={run}", f"output={output}").returncode == 0
    report = command("scripts/report.py", "group=default", f"results_dir={here}/results")
    assert report.returncode == 0, report.stderr

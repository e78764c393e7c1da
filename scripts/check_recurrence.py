"""Compare FLA's recurrence with plain torch on this GPU: `python scripts/check_recurrence.py model=kda size=1b3`."""

from linrnn.config.cli import run
from linrnn.config.schema import Config
from linrnn.core.errors import UnsupportedError


def main(config: Config) -> None:
    from linrnn.core.output import say
    from linrnn.experiments.recurrence import measure
    from linrnn.models import tuning
    from linrnn.training.runtime import resolve_device

    device = resolve_device(config.device)
    if device.type == "cpu":
        raise UnsupportedError("a CPU runs plain torch: there is no kernel to compare", "run this on a GPU")
    with tuning.show_progress(), tuning.during("the recurrence"):
        agreement = measure(config, device)
    say(agreement.markdown())
    say(tuning.remark() or "no kernel has configurations")
    if not agreement.holds:
        raise UnsupportedError(
            "FLA's kernels compute something else than plain torch here",
            "use another version of Triton, trainer.kernel_choices=tune or other heads (docs/first_step.md)",
        )


if __name__ == "__main__":
    run(main, description=__doc__ or "")

"""The style of every plot: colours, markers, sizes, legends and files.

Each loss has one colour and one marker. The colours are Okabe and Ito's, which readers with any colour vision tell
apart; `compiled`, the baseline, is grey. A loss with other options keeps its colour and marker, and gets another
filling of the marker and another dash of the line.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# For each loss: colour, marker, and a description if the name does not say what it is.
LOSSES = {
    "standard": ("#000000", "X", "eager PyTorch"),
    "compiled": ("#8C8C8C", "s", "torch.compile"),
    "compiled_nudged": ("#BBBBBB", "<", "noise floor"),
    "cce_kahan": ("#0072B2", "o", "ours, exact"),
    "cce_filter": ("#56B4E9", "^", "ours, samples"),
    "liger": ("#D55E00", "v", "Liger"),
    "fla": ("#E69F00", "P", "flash-linear-attention"),
    "torch_native": ("#009E73", "h", "PyTorch"),
    "cce_apple": ("#CC79A7", "D", "Apple's cce"),
    "quack": ("#117733", "H", "QuACK"),
    "paper": ("#882255", "d", "presets of the CCE paper"),
    "three_products_cublas": ("#332288", "*", "lower bound"),
    "fp32_logits": ("#7A5C3E", "p", "fp32 logits"),
}
SIZES = {"s": 9.5, "X": 9}  # marker sizes in points: a baseline stays visible behind a loss with the same value
OTHER = ("#44AA99", "8", "")  # for a loss that only the benchmark knows
FILLINGS = ("full", "none", "left", "bottom", "right", "top")
DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 4)))
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # for curves of other things, e.g. models
GREY, PALE = "#666666", "#E4E4E4"
WIDTH = 10.0  # inches; the widest figure. Git hosts show it at about 900 pixels
_LOOKS: Any = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "figure.titlesize": 12,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#EBEBEB",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
}


@dataclass(frozen=True)
class Look:
    """How one loss with one choice of options is drawn."""

    colour: str
    marker: str
    filling: str = "full"
    dash: Any = "-"

    @property
    def point(self) -> dict[str, Any]:
        """Arguments of pyplot's `plot` for markers alone."""
        size = SIZES.get(self.marker, 7)
        filled = {"fillstyle": self.filling, "markerfacecoloralt": "white", "markersize": size}
        return {"color": self.colour, "marker": self.marker, "linestyle": "none", "zorder": 10 - size / 2, **filled}


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """A look for each label. A label is a loss's name, followed by its options."""
    labels = list(dict.fromkeys(labels))
    found, seen = {}, Counter[str]()
    for label in sorted(labels, key=lambda label: label != loss_of(label)):  # without options: the filled marker
        colour, marker, _ = LOSSES.get(loss_of(label), OTHER)
        place = seen[loss_of(label)] % len(FILLINGS)
        seen[loss_of(label)] += 1
        found[label] = Look(colour, marker, FILLINGS[place], DASHES[place])
    return {label: found[label] for label in labels}


def loss_of(label: str) -> str:
    """The loss that a label begins with. All presets of the paper count as one loss."""
    return label.split()[0].split("/")[0]


def in_words(label: str) -> str:
    """A loss's label for a legend. It describes the loss if the name does not say what it is."""
    loss, _, options = label.partition(" ")
    words = LOSSES.get(loss, OTHER)[2]
    told = f"{loss} ({words})" if words and words.lower() != loss else loss
    return f"{told} {options}".strip()


def subplots(*arguments: Any, **options: Any) -> Any:
    """pyplot's `subplots` in the project's style. A notebook shows its figures in cells; elsewhere they are only
    files."""
    import matplotlib

    if "inline" not in matplotlib.get_backend():
        matplotlib.use("agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(_LOOKS)
    return pyplot.subplots(*arguments, **options)


def save(figure: Any, path: Path) -> Path:
    """Write a PNG of 256 colours, which take a third of the bytes, close the figure, and return the path."""
    from matplotlib import pyplot
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def legend_below(figure: Any, lines: Mapping[str, Any], note: str = "") -> None:
    """One legend for all panels below them, and a note below the legend, with room for both and for the title."""
    width, height = figure.get_size_inches()
    columns = max(min(len(lines), int(width * 13 // (max(map(len, lines), default=1) + 6)), 6), 1)
    legend, below = 0.185 * -(-len(lines) // columns) + 0.08, 0.17 * len(note.splitlines()) + 0.05 * bool(note)
    figure.tight_layout(rect=(0, (legend + below) / height, 1, 1 - 0.1 / height))
    if lines:
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, below / height), "borderaxespad": 0.1}
        figure.legend(list(lines.values()), list(lines), ncol=columns, handletextpad=0.5, **place)
    if note:
        figure.text(0.5, 0.05 / height, note, ha="center", va="bottom", fontsize=8, color=GREY)

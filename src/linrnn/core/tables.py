"""Tables of results. All Markdown tables are written here, and so are the numbers in their cells."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table, before it becomes Markdown or HTML."""

    columns: Sequence[str]  # the headings
    rows: Sequence[Sequence[object]]  # one cell for each column; a cell is shown as `str` shows it
    words: Collection[str] = ()  # the columns that hold words. They are aligned left, columns of numbers right

    def __bool__(self) -> bool:
        return bool(self.rows)

    def markdown(self) -> list[str]:
        """The lines of the Markdown table. A bar in a cell is escaped, so that no text can break a row."""
        rule = "|".join("---" if column in self.words else "--:" for column in self.columns)
        return [_line(self.columns), f"|{rule}|", *map(_line, self.rows)]


def _line(cells: Sequence[object]) -> str:
    texts = [str(cell).replace("|", "\\|") for cell in cells]
    return f"|{'|'.join(f' {text} ' if text else ' ' for text in texts)}|"


def show(value: float | None, form: str, unit: float = 1.0) -> str:
    """A number in multiples of `unit`, formatted; `-` for None."""
    if value is None:
        return "-"
    return f"{value:{form}}" if unit == 1.0 else f"{value / unit:{form}}"

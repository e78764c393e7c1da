"""Which rows of every parameter a rank holds."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Part:
    """The rows of one rank, out of `count` parts of equal size. The last parts may have fewer rows or none.

    FSDP2 and torch.chunk cut tensors in the same way.
    """

    index: int
    count: int

    def of(self, whole: Tensor) -> Tensor:
        """This part of a tensor's rows, as a view."""
        rows = -(-len(whole) // self.count) if whole.ndim else 0
        return whole[self.index * rows : (self.index + 1) * rows] if whole.ndim else whole


WHOLE = Part(0, 1)


def keep(tensor: Tensor, value: Tensor, part: Part) -> None:
    """Copy a value into a tensor; into a DTensor, whose rows this rank has as `part`, those rows of the value."""
    if hasattr(tensor, "to_local"):
        tensor.to_local().copy_(part.of(value))
    else:
        tensor.copy_(value)

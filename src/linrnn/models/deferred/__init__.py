"""Models whose weights come into being after the model is sharded, so that no rank ever holds the whole model."""

from linrnn.models.deferred.blank import BlankModel, allocate
from linrnn.models.deferred.part import WHOLE, Part

__all__ = ["WHOLE", "BlankModel", "Part", "allocate"]

"""Ranks that stay for all runs."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from pool import Pool
from rank_process import trained_in


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def trained(pool: Pool, tmp_path: Path) -> Callable[[list[str], int], Path]:
    """The directory of a run, with these overrides and so many ranks, that finished."""
    return partial(trained_in, pool, tmp_path=tmp_path)

"""Batches: the right tokens and labels, one global order for any number of ranks, exact resume."""

from functools import partial

import numpy as np
import pytest
import torch
from data_helpers import shard_set
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linrnn.core.errors import DataError
from linrnn.data import Batch, BatchesOnce, BatchLoader, ShardSet
from linrnn.data.batches import cycle_of


@pytest.fixture(scope="module")
def documents() -> list[np.ndarray]:
    """Documents of 1 to 60 tokens whose concatenation is 0, 1, 2, …, so that a token tells its position."""
    lengths = np.random.RandomState(0).randint(1, 60, size=40)
    return np.split(np.arange(lengths.sum()), np.cumsum(lengths)[:-1])


@pytest.fixture(scope="module")
def shards(documents: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    return shard_set(tmp_path_factory.mktemp("shards") / "set", documents, vocab_size=2000)


def take(loader: BatchLoader, n: int) -> list[Batch]:
    return [next(loader) for _ in range(n)]


def rows(batches: list[Batch]) -> list[list[int]]:
    return [row for batch in batches for row in batch.input_ids.tolist()]


def same(a: Batch, b: Batch) -> bool:
    cu = (a.cu_seqlens is None and b.cu_seqlens is None) or torch.equal(a.cu_seqlens, b.cu_seqlens)
    return cu and torch.equal(a.input_ids, b.input_ids) and torch.equal(a.labels, b.labels)


def test_labels_are_the_next_tokens_and_an_epoch_visits_every_block_once(shards):
    seq_len = 16
    loader = BatchLoader(shards, seq_len=seq_len, batch_size=1, seed=1)
    for _ in range(2):
        batches = take(loader, loader.n_sequences)
        for batch in batches:
            assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
            assert batch.n_tokens == seq_len
            assert torch.equal(batch.labels, batch.input_ids + 1)
        starts = [row[0] for row in rows(batches)]
        assert sorted(starts) == list(range(0, loader.n_sequences * seq_len, seq_len))
        assert starts != sorted(starts)
    assert loader.n_sequences == (shards.n_tokens - 1) // seq_len


@pytest.fixture(scope="module")
def mixture(shards: ShardSet, tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """70 % of `shards`, and 30 % of a smaller source, whose tokens go on counting."""
    other = np.split(np.arange(shards.n_tokens, shards.n_tokens + 330), [7, 150, 151])
    small = shard_set(tmp_path_factory.mktemp("mixture") / "set", other, vocab_size=2000)
    return ShardSet.mixture(["large", "small"], [shards, small], [7, 3])


@pytest.fixture
def text(request: pytest.FixtureRequest) -> ShardSet:
    """The fixture that the test names."""
    return request.getfixturevalue(request.param)


WITH_A_MIXTURE = pytest.mark.parametrize("text", ["shards", "mixture"], indirect=True)


@WITH_A_MIXTURE
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world_size=st.integers(1, 5),
    batch_size=st.integers(1, 5),
    seq_len=st.integers(1, 300),
    reset=st.booleans(),
    steps=st.integers(0, 9),
    seed=st.integers(0, 2**31),
)
def test_the_global_order_does_not_depend_on_the_ranks_and_resumes_exactly(
    text, world_size, batch_size, seq_len, reset, steps, seed
):
    loader = partial(BatchLoader, text, seq_len=seq_len, seed=seed, reset_at_document=reset)
    whole = loader(batch_size=world_size * batch_size)
    ranks = [loader(batch_size=batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    for _ in range(steps):
        one = next(whole).input_ids.reshape(-1, seq_len)
        parts = [next(rank).input_ids.reshape(-1, seq_len) for rank in ranks]
        assert torch.equal(one, torch.stack(parts, dim=1).reshape(-1, seq_len))
    # Every rank's state continues every other rank, and the run with one rank.
    state = ranks[-1].state_dict()
    resumed = loader(batch_size=world_size * batch_size)
    resumed.load_state_dict(state)
    assert all(same(a, b) for a, b in zip(take(whole, 3), take(resumed, 3), strict=True))
    assert resumed.state_dict() == whole.state_dict()


@WITH_A_MIXTURE
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_knows_how_many_labels_a_step_of_all_ranks_holds(reset, world_size, text):
    """A step has two micro-steps. The steps cross the ends of documents, shards and epochs."""
    loaders = [
        BatchLoader(text, seq_len=16, batch_size=5, seed=1, rank=rank, world_size=world_size, reset_at_document=reset)
        for rank in range(world_size)
    ]
    counts = set()
    for _ in range(2 * loaders[0].n_sequences // (10 * world_size) + 2):
        foreseen = {loader.labels_ahead(2) for loader in loaders}
        assert foreseen == {sum(batch.n_tokens for loader in loaders for batch in take(loader, 2))}
        counts |= foreseen
    assert (len(counts) > 1) == reset


@pytest.mark.parametrize("change", ["data", "seq_len", "seed"])
def test_a_position_in_other_data_or_another_order_is_refused(shards, tmp_path, change):
    state = BatchLoader(shards, seq_len=16, batch_size=2, seed=0).state_dict()
    other = shard_set(tmp_path / "other", [np.arange(900)]) if change == "data" else shards
    settings = {"seq_len": 16, "seed": 0} | {"seq_len": {"seq_len": 17}, "seed": {"seed": 1}}.get(change, {})
    loader = BatchLoader(other, batch_size=2, **settings)
    with pytest.raises(DataError, match="fingerprint" if change == "data" else change):
        loader.load_state_dict(state)


def test_with_reset_no_label_crosses_a_document_and_every_document_starts_a_sequence(shards, documents):
    seq_len, batch_size = 48, 4
    document_of = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
    plain = BatchLoader(shards, seq_len=seq_len, batch_size=batch_size, seed=3)
    reset = BatchLoader(shards, seq_len=seq_len, batch_size=batch_size, seed=3, reset_at_document=True)
    masked = 0
    for _ in range(30):
        batch, flat = next(plain), next(reset)
        assert flat.input_ids.shape == flat.labels.shape == (1, batch_size * seq_len)
        assert torch.equal(flat.input_ids, batch.input_ids.reshape(1, -1))
        inputs = flat.input_ids[0].numpy()
        crosses = document_of[inputs] != document_of[inputs + 1]
        np.testing.assert_array_equal(flat.labels[0].numpy(), np.where(crosses, -100, inputs + 1))
        changes = np.flatnonzero((np.diff(inputs) != 1) | (np.diff(document_of[inputs]) != 0)) + 1
        # Rows are boundaries even if a row happens to continue the previous one.
        expected = np.union1d(changes, np.arange(batch_size + 1) * seq_len)
        assert flat.cu_seqlens.dtype == torch.int32
        np.testing.assert_array_equal(flat.cu_seqlens.numpy(), expected)
        assert flat.n_tokens == int((flat.labels != -100).sum())
        masked += int(crosses.sum())
    assert masked > 100


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(("seq_len", "batch_size"), [(16, 4), (17, 3), (5000, 2), (1, 1)])
def test_a_validation_pass_predicts_every_token_once(shards, documents, seq_len, batch_size, reset):
    batches = list(BatchesOnce(shards, seq_len, batch_size, reset_at_document=reset))
    inputs = torch.cat([batch.input_ids.reshape(-1) for batch in batches]).numpy()
    labels = torch.cat([batch.labels.reshape(-1) for batch in batches]).numpy()
    kept = labels != -100
    np.testing.assert_array_equal(labels[kept], inputs[kept] + 1)
    firsts = {int(document[0]) for document in documents} if reset else {0}
    assert labels[kept].tolist() == [t for t in range(shards.n_tokens) if t not in firsts]
    assert sum(batch.n_tokens for batch in batches) == kept.sum()
    assert len({batch.input_ids.shape for batch in batches}) == 1  # padding, not a ragged last batch
    assert len(batches) == -(-(shards.n_tokens - 1) // (seq_len * batch_size))


def test_a_bounded_validation_pass_predicts_exactly_so_many_tokens(shards):
    for max_tokens in (1, 47, 64, 65, 10**9):
        batches = list(BatchesOnce(shards, 16, 2, max_tokens))
        assert sum(batch.n_tokens for batch in batches) == min(max_tokens, shards.n_tokens - 1)


@pytest.mark.parametrize("weights", [[0.7, 0.3], [3, 1, 2], [0.01, 0.99], [0.333, 0.333, 0.334], [5]])
def test_at_every_row_each_source_has_its_share(weights):
    order = np.tile(cycle_of(weights), 3)
    for source, weight in enumerate(weights):
        lag = weight / sum(weights) * np.arange(1, len(order) + 1) - np.cumsum(order == source)
        assert abs(lag[len(order) // 3 - 1]) < 1e-9, "exactly, over a whole cycle"
        assert np.abs(lag).max() < 1


def test_each_source_of_a_mixture_has_epochs_of_its_own(mixture, shards):
    large, small = mixture.parts
    loader = BatchLoader(mixture, seq_len=16, batch_size=10, seed=1)
    starts = [row[0] for row in rows(take(loader, 14))]
    of_small = [start for start in starts if start >= small.start]
    n_small, n_large = (small.n_tokens - 1) // 16, (large.n_tokens - 1) // 16
    assert (len(starts), len(of_small), n_small) == (140, 42, 20)
    first, second = of_small[:n_small], of_small[n_small : 2 * n_small]
    assert sorted(first) == sorted(second) == list(range(small.start, small.start + 16 * n_small, 16))
    assert first != second
    alone = BatchLoader(shards, seq_len=16, batch_size=1, seed=1)
    assert [start for start in starts if start < small.start] == [row[0] for row in rows(take(alone, 98))]
    assert loader.remark(140) == f"140 sequences are {98 / n_large:.2f} epochs of large, 2.10 epochs of small"


@pytest.mark.parametrize(
    ("max_tokens", "of_each"), [(None, (None, 329)), (400, (280, 120)), (2000, (None, 329)), (1, (1, 1))]
)
def test_a_validation_pass_reads_the_share_of_each_source(mixture, max_tokens, of_each):
    large, small = mixture.parts
    batches = BatchesOnce(mixture, 16, 3, max_tokens)
    labels = torch.cat([batch.labels[batch.labels != -100] for batch in batches]).tolist()
    of_large = of_each[0] or large.n_tokens - 1
    assert labels == [*range(1, 1 + of_large), *range(small.start + 1, small.start + 1 + of_each[1])]
    assert all(torch.equal(b.labels[b.labels != -100], b.input_ids[b.labels != -100] + 1) for b in batches)


def test_text_shorter_than_one_block_is_refused_with_both_lengths(tmp_path):
    shards = shard_set(tmp_path / "set", [np.arange(100)])
    assert BatchLoader(shards, seq_len=99, batch_size=8, seed=0).n_sequences == 1
    with pytest.raises(DataError, match="100 tokens, one sequence needs 101"):
        BatchLoader(shards, seq_len=100, batch_size=1, seed=0)


def test_the_order_never_changes_between_versions(shards):
    """Recorded figures: a run continued after an upgrade must use the same blocks."""
    loader = BatchLoader(shards, seq_len=100, batch_size=10, seed=7)
    assert [row[0] // 100 for row in rows(take(loader, 1))] == [4, 5, 9, 8, 1, 7, 6, 0, 2, 3]

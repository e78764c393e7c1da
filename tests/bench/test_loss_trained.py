"""Problems from trained models: the order of the vocabulary, batches, and what is rejected."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fitting import fitted

from linrnn.bench.loss.problems import Shape
from linrnn.bench.loss.trained import TrainedTensors, read_trained
from linrnn.core.errors import ConfigError
from linrnn.data import BatchesOnce

CPU = torch.device("cpu")


def tensors(n: int = 6, d: int = 5, v: int = 40) -> TrainedTensors:
    random = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2 * n, d, generator=random), torch.randn(v, d, generator=random)
    return TrainedTensors(Shape("s", n, d, v), "a model", hidden, weight, torch.randint(v, (2 * n,), generator=random))


def test_the_vocabulary_is_permuted_and_the_loss_stays():
    trained = tensors()
    problem, other = (trained.problem(torch.float32, CPU, seed) for seed in (1, 2))
    rows = slice(0, 6)
    exact = F.cross_entropy(trained.hidden_ND[rows] @ trained.weight_VD.T, trained.labels_N[rows])
    for found in (problem, other):
        torch.testing.assert_close(F.cross_entropy(found.hidden_ND @ found.weight_VD.T, found.labels_N), exact)
        torch.testing.assert_close(found.weight_VD[found.labels_N], trained.weight_VD[trained.labels_N[rows]])
        assert not torch.equal(found.weight_VD, trained.weight_VD)
    assert not torch.equal(problem.weight_VD, other.weight_VD)
    assert torch.equal(problem.weight_VD, trained.problem(torch.float32, CPU, 1).weight_VD)


def test_batches_are_rows_one_after_another_with_one_head():
    trained = tensors()
    first, second = (trained.problem(torch.float32, CPU, 0, batch=batch) for batch in (0, 1))
    assert torch.equal(torch.cat([first.hidden_ND, second.hidden_ND]), trained.hidden_ND)
    assert torch.equal(first.weight_VD, second.weight_VD)


def test_leaves_hold_rounded_values_and_share_no_memory_with_the_model():
    trained = tensors()
    problem = trained.problem(torch.bfloat16, CPU, 0, torch.float32)
    assert problem.hidden_ND.is_leaf
    assert problem.hidden_ND.requires_grad
    assert torch.equal(problem.hidden_ND, trained.hidden_ND[:6].bfloat16().float())
    same = trained.problem(torch.float32, CPU, 0)
    assert same.hidden_ND.data_ptr() != trained.hidden_ND.data_ptr()


def test_every_batch_has_its_rows_where_some_labels_are_ignored(small):
    """With data.reset_at_document a document's first token has no label. More text is read instead."""
    trainer = fitted(small("data.reset_at_document=true", "trainer.max_steps=1"))
    valid, path = trainer.data.valid, str(trainer.directory.path)
    n_labels = sum(batch.n_tokens for batch in BatchesOnce(valid, 80, 2, reset_at_document=True))
    assert 1900 < n_labels < valid.n_tokens - 1

    def trained(tokens: int) -> TrainedTensors:
        return read_trained(SimpleNamespace(checkpoint=path, data=[], device="cpu", tokens=tokens), batches=2)

    half = n_labels // 2
    found = trained(half)
    assert len(found.labels_N) == len(found.hidden_ND) == 2 * half
    assert (found.labels_N >= 0).all()
    with pytest.raises(ConfigError, match=rf"2 x {half + 1:,} labels .* more than the {n_labels:,} of the validation"):
        trained(half + 1)

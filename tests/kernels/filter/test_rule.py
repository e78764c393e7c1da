"""The filter's rule: which entries it draws, keeps and plans room for."""

from dataclasses import replace

import pytest
import torch
from cases import BF16
from cce_kernels.filter import rule as filter_rule
from cce_kernels.filter.rule import Rule, by_likelihood, likely_sizes, mean_logits
from cce_kernels.options import Options
from cce_kernels.planner import ListMemory, Problem, plan


def taken(drawn: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    return torch.where(times > 0, drawn, -1)


@pytest.mark.parametrize("most_head", [64, 16])
def test_samples_have_one_of_each_group_and_are_right_on_average(monkeypatch, most_head):
    """From each group of neighbours, by place and by likelihood, one entry is drawn.

    Over seeds the draws are uniform and independent of neighbours and of other blocks of rows. Weights equal p on
    average.
    """
    monkeypatch.setattr(filter_rule, "MOST_HEAD", most_head)
    monkeypatch.setattr(filter_rule, "LIKELY_SHARE", 16)
    n_rows, dim, vocab, seeds = 2 * filter_rule.block_rows(4096), 4096, 1024, 300
    wide = 2**20  # blocks of few rows, whose weights are soon computed
    p_e = torch.rand(2 * filter_rule.block_rows(wide), vocab, dtype=torch.float64) * 2.0**-6
    p_c = torch.rand(n_rows, 7, dtype=torch.float64) * 2.0**-6
    some, all_entries, falling = torch.arange(7), torch.arange(vocab), torch.arange(vocab, 0, -1.0)
    drawn, weights_e, weights_c = [[], []], torch.zeros_like(p_e[[0, -1]]), torch.zeros_like(p_c)
    for i in range(seeds):
        targets = torch.full((n_rows,), i).index_fill_(0, torch.tensor([5]), -1) % vocab
        rule = Rule.of(targets, falling, Options(filter_eps=2.0**-7, filter_unbiased=True))
        sample = rule.sample(targets, dim, vocab)
        drawn[0].append(taken(sample.columns, sample.times)[:, : vocab // filter_rule.COLUMN_GROUP])
        drawn[1].append(taken(sample.rows, sample.row_times))
        if i < 150:
            weights_e += rule.weights_e(p_e, all_entries, wide, vocab)[[0, -1]] / 150
            weights_c += rule.weights_c(p_c, some) / 150
    likely = (64 - most_head) // filter_rule.LIKELY_GROUP
    assert sample.columns.shape[1] == -(-vocab // filter_rule.COLUMN_GROUP) + likely
    assert (sample.times == filter_rule.LIKELY_GROUP).sum() == 2 * likely
    stacked = torch.stack(drawn[0]), torch.stack(drawn[1])
    for x, size in zip(stacked, (filter_rule.COLUMN_GROUP, filter_rule.ROW_GROUP), strict=True):
        places = x - size * torch.arange(x.shape[-1])
        there = places[x >= 0]
        assert ((there >= 0) & (there < size)).all()
        share = torch.bincount(there, minlength=size) / there.numel()
        left_out = 64 / vocab if size == filter_rule.COLUMN_GROUP else 0  # the same entries in most of the calls
        assert (share - 1 / size).abs().max() < 5 * (1 / size / there.numel()) ** 0.5 + left_out / size
        both = (places[..., 1:] == places[..., :-1])[(x[..., 1:] >= 0) & (x[..., :-1] >= 0)].double()
        assert abs(both.mean() - 1 / size) < 5 * (1 / size / both.numel()) ** 0.5 + left_out / size
    first, second = stacked[0].unbind(dim=1)
    same = (first == second)[(first >= 0) & (second >= 0)].double()
    assert abs(same.mean() - 1 / filter_rule.COLUMN_GROUP) < 5 * (1 / filter_rule.COLUMN_GROUP / same.numel()) ** 0.5

    spread = 5.5 * (max(filter_rule.COLUMN_GROUP, filter_rule.ROW_GROUP) - 1) ** 0.5 * 2.0**-7 / 150**0.5
    assert (weights_e - p_e[[0, -1]]).abs().max() < spread
    assert (weights_c - p_c).abs().max() < spread
    assert weights_e.sum().item() == pytest.approx(p_e[[0, -1]].sum().item(), rel=0.03)
    assert weights_c.sum().item() == pytest.approx(p_c.sum().item(), rel=0.03)


def test_head_and_likely_entries_are_small_shares_of_the_vocabulary():
    assert likely_sizes(128256) == (4096, 16032)
    assert likely_sizes(256000) == (4096, 32000)
    assert likely_sizes(700) == (32, 80)
    assert likely_sizes(100) == (0, 0)


def test_the_likeliest_entries_of_the_mean_hidden_state_come_first():
    """With probabilities that vary from row to row around a frequency, as in text. Ties are ordered by index."""
    random = torch.Generator().manual_seed(0)
    o = Options(filter_eps=2.0**-8, filter_unbiased=True)
    common, e = torch.randn(64, generator=random), torch.randn(500, 64, generator=random)
    c = torch.outer(torch.randn(900, generator=random), common) / 8 + torch.randn(900, 64, generator=random) / 16
    columns = torch.zeros(500, dtype=torch.int64).index_fill_(0, torch.arange(100, 500), -1)
    e[:100] += common
    e[100:] -= common  # rows that do not count
    rank, likely = by_likelihood(mean_logits(e, c, None, columns, o), 90)
    mean_p = torch.softmax(e[:100] @ c.T, dim=1).mean(dim=0)
    assert mean_p[likely].sum() > 0.9 * mean_p.topk(90).values.sum()
    assert torch.equal(rank[likely], torch.arange(90, dtype=torch.int32))
    assert torch.equal(by_likelihood(torch.zeros(50), 7)[1], torch.arange(7))
    assert by_likelihood(torch.zeros(50), 0) == (None, None)
    assert mean_logits(e, c, None, columns, replace(o, filter_unbiased=False)) is None


def test_entries_rank_by_the_scale_that_kernels_are_given():
    """Triton passes a number in fp32."""
    e, c = torch.randn(50, 64).bfloat16(), torch.randn(900, 64).bfloat16()
    columns, o = torch.zeros(50, dtype=torch.int64), Options(filter_eps=2.0**-8, filter_unbiased=True)
    in_fp32 = torch.tensor(0.3, dtype=torch.float32).item()
    given, rounded = (mean_logits(e, c, None, columns, replace(o, logit_scale=scale)) for scale in (0.3, in_fp32))
    assert torch.equal(given, rounded)


@pytest.mark.parametrize("workspace_mib", [48, 64, 100, 256, 1000])
@pytest.mark.parametrize("unbiased", [False, True])
def test_lists_leave_room_for_the_head(unbiased, workspace_mib):
    """If lists are planned, the head's gradient, rows of C, probabilities and rows of E fit beside them."""
    o = Options(filter_eps=2.0**-12, filter_unbiased=unbiased, workspace_mib=workspace_mib)
    planned = []
    for n, d, v in [(16384, 1024, 131072), (8192, 2304, 256000), (1024, 4096, 128256), (16384, 256, 32000)]:
        capacity = plan(Problem(n, d, v, BF16, BF16, BF16, False, False, False), 132, o).capacity
        planned.append(capacity)
        n_head = likely_sizes(v)[0] if unbiased else 0
        if capacity and n_head:
            rows = ListMemory(n, d, v, capacity, o).head_rows()
            beside = 8 * capacity + 6 * d * n_head
            taken, in_fewer = (beside + x * 2 * (n_head + d) for x in (rows, n / max(1, -(-n // rows) - 1)))
            assert 128 <= rows <= n
            assert taken <= workspace_mib * 2**20
            assert rows == n or in_fewer + 8 * 2**20 > workspace_mib * 2**20  # 8: small vectors
    assert any(planned)
    assert all(planned) or workspace_mib <= 100


@pytest.mark.parametrize(("n_rows", "dim", "vocab"), [(256, 2048, 256000), (1024, 2048, 256000), (16384, 1024, 131072)])
def test_what_lists_keep_is_accounted_for(n_rows, dim, vocab):
    pytest.importorskip("triton")
    from cce_kernels.filter.select import empty_lists

    o = Options(filter_eps=2.0**-12, filter_unbiased=True)
    kept = empty_lists(torch.empty(n_rows, dtype=torch.int64, device="meta"), dim, vocab, 65536, o)
    assert sum(x.nbytes for x in kept) <= ListMemory(n_rows, dim, vocab, 65536, o).state()


def test_lists_are_no_longer_than_their_places_can_say():
    """Places have 32 bits. Beyond that the lists overflow, as they do if memory is short."""
    problem = Problem(5_000_000, 64, 256_000, BF16, BF16, BF16, False, False, False)
    capacity = plan(problem, 132, Options(filter_eps=2.0**-10, workspace_mib=400_000)).capacity
    assert 2**30 < capacity < 2**31

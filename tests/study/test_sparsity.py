"""Histograms of softmax entries against their definition."""

import pytest
import torch

from study.sparsity import (
    BANDS,
    EXPONENTS,
    ORDERS,
    add_histograms,
    bands,
    mass_of_first,
)


def test_entries_and_mass_are_counted_by_power_of_two_and_band():
    generator = torch.Generator().manual_seed(0)
    log_p = (4 * torch.randn(7, 400, generator=generator)).log_softmax(dim=1)
    counts = torch.randint(0, 1000, (400,), generator=generator)
    band = bands(counts)
    entries, mass = torch.zeros(len(BANDS), EXPONENTS).double(), torch.zeros(len(BANDS), EXPONENTS).double()
    for rows in log_p.split(3):
        add_histograms(rows, band, entries, mass)
    p = log_p.exp()
    for k in (1, 3, 8, 12):
        for b in range(len(BANDS)):
            above = p[:, band == b] >= 2.0**-k
            assert entries[b, : k + 1].sum() == above.sum()
            assert mass[b, : k + 1].sum().item() == pytest.approx(
                p[:, band == b][above].double().sum().item(), abs=1e-5
            )
    assert entries.sum() == 7 * 400
    assert mass.sum().item() == pytest.approx(7, rel=1e-5)


def test_bands_go_by_frequency_and_share_out_the_vocabulary():
    counts = torch.arange(3200)
    band = bands(counts)
    assert torch.bincount(band).tolist() == [2, 30, 288, 2880]
    assert band.flip(0).diff().min() >= 0


def test_the_first_entries_have_the_mass_that_their_order_gives_them():
    mean_p = torch.tensor([0.5, 0.2, 0.1, 0.1] + [0.1 / 28] * 28)
    rising, ties = torch.arange(32), torch.zeros(32)
    found = mass_of_first(mean_p, (mean_p, rising, ties))
    assert found[ORDERS[0]] == pytest.approx([0.5, 0.9])
    assert found[ORDERS[1]] == pytest.approx([0.1 / 28, 0.4 / 28])
    assert found[ORDERS[2]] == found[ORDERS[0]]  # ties go by index

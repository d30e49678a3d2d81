"""Calibration against counts by hand; correlation and the length baseline."""

import numpy as np

from jaxrlhf.rewards.calibration import calibration, correlation, length_baseline


def test_bins_by_hand():
    logit = np.log([0.65 / 0.35, 0.69 / 0.31, 0.95 / 0.05])
    gaps = np.array([logit[0], -logit[1], logit[2], logit[2], 0.0])
    found = calibration(gaps, bins=5)
    assert found.counts.tolist() == [1, 2, 0, 0, 2]
    np.testing.assert_allclose(found.predicted, [0.5, 0.67, np.nan, np.nan, 0.95])
    np.testing.assert_allclose(found.accuracy, [0.5, 0.5, np.nan, np.nan, 1.0])
    np.testing.assert_allclose(found.error, (2 * 0.17 + 2 * 0.05) / 5)


def test_a_calibrated_model_and_a_boaster(rng):
    gaps = rng.normal(0, 2, size=20_000)
    outcome = rng.random(20_000) < 1 / (1 + np.exp(-gaps))
    honest = np.where(outcome, gaps, -gaps)
    assert calibration(honest).error < 0.015
    assert calibration(5 * honest).error > 0.1
    assert calibration(np.array([1e4, -1e4])).error == 0.5
    assert calibration(np.zeros(0)).error == 0


def test_correlation(rng):
    x, y = rng.normal(size=(2, 50))
    np.testing.assert_allclose(correlation(x, x + y), np.corrcoef(x, x + y)[0, 1])
    assert np.isnan(correlation(x, np.ones(50)))


def test_length_baseline_learns_its_direction_from_training():
    assert length_baseline(np.array([3, -1, 2]), np.array([1, 1, -1, 0])) == 0.625
    assert length_baseline(np.array([-3, 1, -2]), np.array([1, 1, -1, 0])) == 0.375

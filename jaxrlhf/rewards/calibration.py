"""How far the scores of a reward model can be believed: calibration, and what length explains."""

from typing import NamedTuple

import numpy as np


class Calibration(NamedTuple):
    """Pairs in bins of the probability that the model gives to the answer that it prefers.

    Attributes:
      predicted: f64[bins], mean of that probability; NaN in an empty bin.
      accuracy: f64[bins], how often that answer was the chosen one; NaN in an empty bin.
      counts: i64[bins], pairs.
      error: the expected calibration error: |accuracy - predicted|, averaged over the pairs.
    """

    predicted: np.ndarray
    accuracy: np.ndarray
    counts: np.ndarray
    error: float


def calibration(gaps: np.ndarray, *, bins: int = 10) -> Calibration:
    """Compares predicted probabilities with outcomes, in equal bins from 1/2 to 1.

    Args:
      gaps: float[N], score of the chosen minus score of the rejected answer; the probability that a
        Bradley-Terry model gives to its favourite is sigmoid(|gap|). A tie is half a success.
      bins: how many.

    References: arXiv:1706.04599 (expected calibration error).
    """
    gaps = np.asarray(gaps, np.float64)
    probability = 1 / (1 + np.exp(-np.abs(gaps)))
    success = np.where(gaps == 0, 0.5, gaps > 0)
    index = np.minimum(((probability - 0.5) * 2 * bins).astype(int), bins - 1)
    counts = np.bincount(index, minlength=bins)
    with np.errstate(invalid="ignore"):
        predicted = np.bincount(index, probability, bins) / counts
        accuracy = np.bincount(index, success, bins) / counts
    errors = np.where(counts > 0, np.abs(accuracy - predicted), 0)
    total = max(int(counts.sum()), 1)
    return Calibration(predicted, accuracy, counts, float((errors * counts).sum() / total))


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation; NaN where one of the two does not vary."""
    x, y = (np.asarray(v, np.float64) - np.mean(v) for v in (x, y))
    norm = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / norm) if norm > 0 else float("nan")


def length_baseline(train_gaps: np.ndarray, val_gaps: np.ndarray) -> float:
    """Accuracy of judging by length alone, the longer or the shorter one by what training says.

    Args:
      train_gaps, val_gaps: int[N], tokens of the chosen minus tokens of the rejected answer. A tie
        is half a success.
    """
    sign = 1 if np.sign(train_gaps).sum() >= 0 else -1
    return float(np.mean((np.sign(val_gaps) * sign + 1) / 2))

"""Loss spikes by the robust score of each loss."""

import math
import random
from pathlib import Path

import pytest

from titanlite.config.schema import SpikeSection
from titanlite.features.diagnose.values import SpikeDetector


def noisy(count: int, level: float = 3.0, noise: float = 0.05, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [level + rng.gauss(0, noise) for _ in range(count)]


def detector(**settings: object) -> SpikeDetector:
    return SpikeDetector(SpikeSection(**{"enable": True, "window": 20, **settings}), Path())  # type: ignore[arg-type]


def test_first_outlier_of_a_window_is_found_with_its_step_and_score():
    spikes = detector()
    assert spikes.add(20, noisy(20)) is None
    spike = spikes.add(24, [3.0, 3.1, 4.0, 5.0])
    assert spike is not None and (spike.step, spike.loss) == (23, 4.0)
    assert spike.median == pytest.approx(3.0, abs=0.05)
    # 1.0 above a median of 3 with a deviation of 0.05: 20, give or take what 20 samples tell about the deviation
    assert 10 < spike.score < 40


def test_noise_a_falling_loss_and_values_that_are_not_finite_are_no_spikes():
    spikes = detector()
    assert spikes.add(2000, noisy(2000)) is None
    falling = detector()
    assert falling.add(300, [8.0 * math.exp(-step / 100) + noise for step, noise in enumerate(noisy(300, 2.0))]) is None
    spikes = detector()
    assert spikes.add(30, [*noisy(20), math.nan, math.inf, *noisy(8, seed=1)]) is None


def test_a_loss_that_hardly_moves_has_no_spikes_in_its_last_digits():
    spikes = detector()
    assert spikes.add(20, [2.0] * 20) is None
    assert spikes.add(21, [2.0 * 1.005]) is None
    assert spikes.add(22, [2.0 * 1.05]) is not None


def test_nothing_is_a_spike_before_half_a_window_is_known_or_when_off():
    assert detector().add(9, [*noisy(8), 50.0]) is None
    assert detector().add(11, [*noisy(10), 50.0]) is not None
    assert SpikeDetector(SpikeSection(), Path()).add(100, [*noisy(99), 50.0]) is None


def test_one_outlier_does_not_move_what_the_next_is_compared_with():
    spikes = detector(threshold=1e9)  # everything is taken in
    spikes.add(22, [*noisy(20), 50.0, 50.0])
    spikes._threshold = 8.0
    spike = spikes.add(23, [4.0])
    assert spike is not None and spike.median == pytest.approx(3.0, abs=0.1)

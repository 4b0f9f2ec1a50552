"""When an adapted backbone is no longer the one it was."""

import math

import pytest

from medusa_train.eval.drift import MAX_KL, MAX_PERPLEXITY_DRIFT, beyond_limits


@pytest.mark.parametrize(
    ("kl", "drift", "told"),
    [
        (0.0, 0.0, None),
        (MAX_KL, MAX_PERPLEXITY_DRIFT, None),
        (0.01, -0.5, None),
        (0.11, 0.0, "0.11 nats per token from the original, over 0.1"),
        (math.nan, 0.0, "nan nats per token"),
        (0.0, 0.051, "5.1% above the original's, over 5%"),
        (0.0, math.nan, "nan% above"),
    ],
)
def test_both_limits_hold_and_what_is_no_number_is_beyond_them(kl, drift, told):
    found = beyond_limits({"kl_to_base": kl, "perplexity_drift": drift})
    assert found is None if told is None else told in found


def test_a_frozen_backbone_is_what_it_was():
    assert beyond_limits({"first_loss": 3.0}) is None

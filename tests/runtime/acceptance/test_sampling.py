"""Parameters, penalties, warpers and random numbers, against transformers and against edges."""

import dataclasses
import math

import numpy as np
import pytest

from eagle3.runtime.acceptance.sampling import (
    CoupledUniforms,
    TokenHistory,
    draft_probs,
    edit_logits,
    log_softmax,
    rejection_rng,
    sample_inverse_cdf,
    target_probs,
)
from eagle3.runtime.errors import EngineError, RequestError
from eagle3.runtime.params import SamplingParams

ANY = SamplingParams(temperature=1.0)


def empty_history(vocab_size):
    history = TokenHistory(vocab_size)
    history.reset([])
    return history


def probs(logits, **params):
    params = {"temperature": 1.0, **params}
    logits = np.asarray(logits, np.float32)
    return target_probs(logits, empty_history(logits.size), (), SamplingParams(**params))


def random_logits(vocab_size, seed, scale=3.0):
    return (np.random.default_rng(seed).standard_normal(vocab_size) * scale).astype(np.float32)


# ---- parameters


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", 10**400),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", None),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -math.inf),
        ("frequency_penalty", 1e39),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("seed", False),
        ("acceptance", "typical"),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"7": 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {7: math.nan}),
        ("logit_bias", {7: -math.inf}),
        ("logit_bias", [(7, 1.0)]),
    ],
)
def test_bad_parameters_name_field_and_value(field, value):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    message = str(error.value)
    assert field in message and ("allowed" in message or "must be one of" in message)
    shown = next(iter(value.values())) if isinstance(value, dict) else value
    assert repr(shown) in message or repr(next(iter(value))) in message


def test_zero_repetition_penalty_says_why():
    with pytest.raises(RequestError, match="divides logits"):
        SamplingParams(repetition_penalty=0)


def test_numbers_become_python_numbers():
    params = SamplingParams(
        temperature=np.float64(0.5), top_k=np.int64(3), seed=2**64 - 1, logit_bias={np.int64(3): 1}
    )
    assert type(params.temperature) is float and type(params.top_k) is int
    assert params.logit_bias == {3: 1.0}
    assert dataclasses.replace(params, top_k=None).temperature == 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0


def test_bias_is_copied():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 3.0
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize(
    ("fields", "greedy", "edits"),
    [
        ({}, True, False),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, False, False),
        ({"repetition_penalty": 1.1}, True, True),
        ({"presence_penalty": -0.5}, True, True),
        ({"frequency_penalty": 0.5}, True, True),
        ({"logit_bias": {0: -100}}, True, True),
    ],
)
def test_properties(fields, greedy, edits):
    params = SamplingParams(**fields)
    assert (params.greedy, params.edits_logits) == (greedy, edits)


def test_bias_outside_the_vocabulary():
    SamplingParams(logit_bias={7: 1.0}).validate_for_vocab(8)
    with pytest.raises(RequestError, match="token id 8.*8 tokens"):
        SamplingParams(logit_bias={8: 1.0}).validate_for_vocab(8)


# ---- history


def test_history_forgets_the_request_before():
    history = TokenHistory(8)
    history.reset([1, 2, 2])
    history.append([2, 3, 3])
    assert sorted(history.ids.tolist()) == [1, 2, 3]
    assert history.generated_counts(np.arange(8)).tolist() == [0, 0, 1, 2, 0, 0, 0, 0]
    history.reset([5])
    assert history.ids.tolist() == [5]
    assert not history.generated_counts(np.arange(8)).any()
    history.append(range(8))
    assert sorted(history.ids.tolist()) == list(range(8))


@pytest.mark.parametrize("token", [-1, 8])
def test_prompt_outside_the_vocabulary(token):
    with pytest.raises(RequestError, match=f"token id {token}.*8 tokens"):
        TokenHistory(8).reset([0, token])


# ---- penalties


def test_inactive_penalties_return_the_same_array():
    logits = random_logits(8, 0)
    assert edit_logits(logits, empty_history(8), [1], ANY) is logits


def test_penalties_by_hand():
    logits = np.array([2, -2, 0, 1, 1, 1, 1, 1], np.float32)
    history = TokenHistory(8)
    history.reset([0, 1, 2])
    history.append([3, 3])
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, logit_bias={7: -100}
    )
    before = logits.copy()
    edited = edit_logits(logits, history, [3, 4], params)
    # 3: halved, then 0.25 + 3 * 0.5 off; 4: halved, then 0.25 + 0.5 off
    assert edited.tolist() == [1, -4, 0, 0.5 - 1.75, 0.5 - 0.75, 1, 1, -99]
    assert (logits == before).all() and edited.dtype == np.float32


def test_repetition_penalty_equals_transformers():
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = random_logits(300, 1)
    logits[:5] = 0.0
    ids = np.random.default_rng(2).integers(0, 300, 80)
    ids[:3] = [0, 1, 1]
    history = TokenHistory(300)
    history.reset(ids[:50])
    history.append(ids[50:70])
    for penalty in (0.5, 1.3):
        wanted = RepetitionPenaltyLogitsProcessor(penalty)(
            torch.from_numpy(ids)[None], torch.from_numpy(logits)[None]
        )
        params = SamplingParams(repetition_penalty=penalty)
        edited = edit_logits(logits, history, ids[70:].tolist(), params)
        np.testing.assert_allclose(edited, wanted[0].numpy(), rtol=1e-6)


def test_a_token_counts_the_same_on_the_path_and_in_the_history():
    """Bit for bit: plain decoding has in the history what speculative decoding has on the path."""
    rng = np.random.default_rng(3)
    params = SamplingParams(
        temperature=0.7,
        repetition_penalty=1.17,
        presence_penalty=0.3,
        frequency_penalty=0.13,
        logit_bias={3: 0.7},
    )
    for _ in range(20):
        logits, output = random_logits(40, int(rng.integers(1000))), rng.integers(0, 40, 30)
        expected = None
        for committed in range(31):
            history = TokenHistory(40)
            history.reset([1, 2, 3])
            history.append(output[:committed])
            p = target_probs(logits, history, output[committed:].tolist(), params)
            expected = p if expected is None else expected
            assert p.tobytes() == expected.tobytes()


# ---- warpers


WARPERS = [
    {},
    {"top_k": 5},
    {"top_k": 1},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.2},
    {"top_p": 0.95, "min_p": 0.02},
]


@pytest.mark.parametrize("params", WARPERS, ids=str)
@pytest.mark.parametrize("vocab_size", [8, 500, 20000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_warpers_equal_transformers(params, vocab_size, temperature):
    import torch
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers = [TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
    warpers += [TopKLogitsWarper(params["top_k"])] if "top_k" in params else []
    warpers += [TopPLogitsWarper(params["top_p"])] if "top_p" in params else []
    warpers += [MinPLogitsWarper(params["min_p"])] if "min_p" in params else []
    for seed, scale in enumerate((0.5, 3.0, 10.0)):
        logits = random_logits(vocab_size, seed, scale)
        scores = torch.from_numpy(logits.copy())[None]
        for warper in warpers:
            scores = warper(None, scores)
        wanted = scores.softmax(-1)[0].numpy()
        p = probs(logits, temperature=temperature, **params)
        assert p.dtype == np.float32
        kept, wanted_kept = int((p > 0).sum()), int((wanted > 0).sum())
        if kept != wanted_kept:  # transformers sums top-p in float32: one token may go either way
            assert abs(kept - wanted_kept) <= 1 + vocab_size // 4000
            np.testing.assert_allclose(p, wanted, atol=2e-4)
        else:
            np.testing.assert_allclose(p, wanted, rtol=2e-5, atol=1e-7)


def nucleus_reference(p, top_p):
    values = np.sort(p)[::-1]
    sums = np.cumsum(values, dtype=np.float64)
    return p >= values[min(np.searchsorted(sums, top_p * sums[-1]), values.size - 1)]


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("rounded", [np.float32, np.float16])
def test_top_p_of_a_large_vocabulary_equals_a_full_sort(scale, rounded):
    logits = random_logits(60000, 7, scale).astype(rounded).astype(np.float32)
    everything = probs(logits)
    for top_p in (0.01, 0.5, 0.9, 0.999, 1 - 1e-9):
        kept = nucleus_reference(everything, top_p)
        assert ((probs(logits, top_p=top_p) > 0) == kept)[everything > 1e-12].all()


def test_ties_at_a_boundary_are_all_kept():
    logits = np.log(np.array([0.4, 0.2, 0.2, 0.2], np.float32))
    np.testing.assert_allclose(probs(logits, top_k=2), [0.4, 0.2, 0.2, 0.2], rtol=1e-6)
    np.testing.assert_allclose(probs(logits, top_p=0.5), [0.4, 0.2, 0.2, 0.2], rtol=1e-6)
    assert (probs(np.zeros(8), top_k=1) > 0).all()


def test_p_does_not_depend_on_the_order_of_the_vocabulary():
    logits = random_logits(5000, 4).astype(np.float16).astype(np.float32)
    order = np.random.default_rng(5).permutation(5000)
    for params in WARPERS:
        kept = probs(logits, **params) > 0
        assert (kept[order] == (probs(logits[order], **params) > 0)).all()


def test_filters_see_what_the_filter_before_left():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # after top-k 2: 0.571, 0.429, so top-p 0.57 keeps one; of the full distribution it keeps two
    assert probs(logits, top_k=2, top_p=0.57).tolist() == [1, 0, 0, 0]
    assert (probs(logits, top_p=0.57) > 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("params", WARPERS, ids=str)
@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 1e-4, 1e4, 1e30])
def test_extreme_temperatures(params, temperature):
    logits = np.array([1e30, -1e30, 3, -np.inf, 1e4, 0, 1, 2], np.float32)
    p = probs(logits, temperature=temperature, **params)
    assert np.isfinite(p).all() and abs(p.sum() - 1) < 1e-5
    assert p[3] == 0.0
    if temperature < 1:
        assert p[0] == 1.0


def test_switched_off_values():
    logits = random_logits(8, 6)
    plain = probs(logits)
    for params in ({"top_k": 0}, {"top_k": 8}, {"top_k": 10**9}, {"top_p": 1}, {"min_p": 0}):
        assert (probs(logits, **params) == plain).all()
    assert (probs(logits, min_p=1.0) > 0).sum() == 1


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.5])
def test_zero_logits(penalty):
    history = TokenHistory(8)
    history.reset([1, 2])
    params = SamplingParams(temperature=1.0, repetition_penalty=penalty)
    p = target_probs(np.zeros(8, np.float32), history, [3], params)
    assert p.tolist() == [0.125] * 8


def test_bias_of_minus_100_bans_and_is_exact():
    logits = random_logits(8, 8)
    best = int(logits.argmax())
    p = probs(logits, logit_bias={best: -100.0})
    assert p[best] < 1e-30
    assert probs(logits, temperature=0.0, logit_bias={best: -100.0})[best] == 0.0


def test_greedy_is_all_mass_on_the_lowest_argmax():
    assert probs([1, 3, 3, 2], temperature=0.0).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("bad", "what"), [(np.nan, "NaN"), (np.inf, r"\+inf"), (-np.inf, "-inf everywhere")]
)
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}])
def test_numbers_that_are_no_numbers(bad, what, params):
    logits = np.full(8, -np.inf, np.float32) if bad == -np.inf else random_logits(8, 9)
    logits[5] = bad
    with pytest.raises(EngineError, match=f"target logits are {what}"):
        probs(logits, **params)


def test_one_finite_logit_is_enough():
    logits = np.full(8, -np.inf, np.float32)
    logits[6] = -5.0
    for params in WARPERS:
        assert probs(logits, **params).tolist() == [0, 0, 0, 0, 0, 0, 1, 0]


def test_logits_are_never_written():
    logits = random_logits(8, 10)
    before = logits.copy()
    for params in WARPERS:
        probs(logits, temperature=0.5, **params)
    assert (logits == before).all()


# ---- drawing


@pytest.mark.parametrize("vocab_size", [1, 8, 512, 513, 1024, 3000])
def test_inverse_cdf_equals_one_long_cumulative_sum(vocab_size):
    p = probs(random_logits(vocab_size, 11))
    sums = np.cumsum(p, dtype=np.float64)
    for u in np.random.default_rng(12).random(500):
        token = sample_inverse_cdf(p, u)
        below = sums[token - 1] if token else 0.0
        assert below - 1e-12 <= u * sums[-1] <= sums[token] + 1e-12 and type(token) is int


@pytest.mark.parametrize("vocab_size", [8, 512, 2000])
@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53, np.nextafter(1.0, 0.0)])
def test_inverse_cdf_never_takes_a_token_without_probability(vocab_size, u):
    rng = np.random.default_rng(13)
    for _ in range(200):
        p = np.zeros(vocab_size, np.float32)
        some = rng.choice(np.arange(1, vocab_size - 1), 3, replace=False)
        p[some] = rng.random(3).astype(np.float32) ** 20 + np.float32(1e-30)
        assert p[sample_inverse_cdf(p, u)] > 0.0


def test_uniforms_depend_on_seed_and_position_alone():
    forwards = CoupledUniforms(7)
    numbers = [forwards.uniform(t) for t in range(700)]
    backwards = CoupledUniforms(7)
    assert [backwards.uniform(t) for t in reversed(range(700))] == numbers[::-1]
    assert CoupledUniforms(7).uniform(300) == numbers[300]
    assert all(0.0 <= u < 1.0 for u in numbers) and len(set(numbers)) == 700
    assert CoupledUniforms(8).uniform(0) != numbers[0]
    CoupledUniforms(2**64 - 1).uniform(2**40)


def test_uniforms_are_what_the_documentation_says():
    """Pinned: a change of these numbers would change every seeded text."""
    words = np.random.Philox(
        key=np.array([5, 1], np.uint64), counter=np.array([0, 1, 0, 0], np.uint64)
    ).random_raw(256)
    assert CoupledUniforms(5).uniform(256 + 9) == int(words[9] >> 11) * 2.0**-53
    assert CoupledUniforms(5).uniform(0) == PINNED_UNIFORM


PINNED_UNIFORM = 0.7176855231898798


def test_uniforms_are_uniform():
    from scipy.stats import kstest

    across_positions, across_seeds = CoupledUniforms(1), range(5000)
    assert kstest([across_positions.uniform(t) for t in range(20000)], "uniform").pvalue > 1e-3
    assert kstest([CoupledUniforms(s).uniform(3) for s in across_seeds], "uniform").pvalue > 1e-3


def test_rejection_rng_is_a_stream_of_its_own():
    numbers = rejection_rng(7).random(100)
    assert (numbers == rejection_rng(7).random(100)).all()
    assert not (numbers == rejection_rng(8).random(100)).any()
    coupled = CoupledUniforms(7)
    assert not set(numbers.tolist()) & {coupled.uniform(t) for t in range(1000)}


# ---- the draft's side


def test_log_softmax():
    logits = np.stack([random_logits(50, 14), random_logits(50, 15) * 1e4])
    wanted = logits.astype(np.float64)
    wanted = wanted - np.log(np.exp(wanted - wanted.max(1, keepdims=True)).sum(1, keepdims=True))
    wanted -= logits.max(1, keepdims=True)
    result = log_softmax(logits)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)
    assert np.isnan(log_softmax(np.array([1, np.nan, np.inf], np.float32))).all()


def test_draft_probs():
    logits = random_logits(8, 16)
    np.testing.assert_allclose(draft_probs(logits, 0.7), probs(logits, temperature=0.7))
    for bad in (np.nan, np.inf, -np.inf):
        logits[3] = bad
        assert draft_probs(logits, 0.7) is None

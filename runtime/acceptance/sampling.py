"""From the target's logits to a token: penalties, warpers and random numbers.

`target_probs` turns the logits of one node into the distribution p. Plain and speculative decoding
both use this one function, so they agree (docs/method.md, section 4). `accept.py` consumes p.

Letters: V target vocabulary, Vd draft vocabulary, C candidates left after a filter.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eagle3.runtime.errors import EngineError, RequestError
from eagle3.runtime.params import SamplingParams

Float32s = NDArray[np.float32]
Int64s = NDArray[np.int64]

_SORT_AT_ONCE = 4096  # number of values that top-p sorts without narrowing the bracket further
_MOST_BISECTIONS = 12  # more do not help, because the remaining values tie
_BLOCK = 512  # entries of p that the inverse CDF sums as one block
_UNIFORMS_PER_BLOCK = 256  # positions that share one Philox counter block
_COUPLED_STREAM, _REJECTION_STREAM = 1, 2  # second half of the Philox key


class TokenHistory:
    """The token ids that penalties apply to: prompt and committed output of ONE request.

    Owns three arrays of size V, which are allocated once. `reset` clears them in O(distinct ids),
    so no state is shared between requests.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._seen = np.zeros(vocab_size, np.bool_)
        self._generated = np.zeros(vocab_size, np.int32)
        self._ids = np.empty(vocab_size, np.int64)  # distinct ids, in order of first appearance
        self._num_ids = 0

    def reset(self, prompt_ids: Sequence[int] | Int64s) -> None:
        """Start a request: clear the history and add the prompt.

        Raises RequestError if a prompt id is outside the vocabulary.
        """
        prompt = np.unique(np.asarray(prompt_ids, np.int64))
        if prompt.size and (prompt[0] < 0 or prompt[-1] >= self.vocab_size):
            bad = int(prompt[0] if prompt[0] < 0 else prompt[-1])
            raise RequestError(
                f"the prompt contains token id {bad}, but the vocabulary has {self.vocab_size} "
                f"tokens; allowed: 0 to {self.vocab_size - 1}"
            )
        self._seen[self.ids] = False
        self._generated[self.ids] = 0
        self._ids[: prompt.size] = prompt
        self._num_ids = prompt.size
        self._seen[prompt] = True

    def append(self, ids: Sequence[int] | Int64s) -> None:
        """Add newly committed output tokens."""
        for token in map(int, ids):
            assert 0 <= token < self.vocab_size, f"token {token} is outside the vocabulary"
            if not self._seen[token]:
                self._seen[token] = True
                self._ids[self._num_ids] = token
                self._num_ids += 1
            self._generated[token] += 1

    @property
    def ids(self) -> Int64s:
        """Distinct ids of prompt and output, int64 [n]: a view that later updates overwrite."""
        return self._ids[: self._num_ids]

    def generated_counts(self, ids: Int64s) -> NDArray[np.int32]:
        """Return how often each of `ids` was generated, int32 [n]; the prompt does not count."""
        return self._generated[ids]


def edit_logits(
    logits: Float32s, history: TokenHistory, path_ids: Sequence[int], params: SamplingParams
) -> Float32s:
    """Apply repetition, presence and frequency penalties, then the logit bias.

    logits: float32 [V]; never modified, and returned itself if nothing is active.
    history: all committed tokens, including the root.
    path_ids: the draft tokens from the root's child down to the node.

    A token has the same effect, bit for bit, in `history` and in `path_ids`. This keeps plain and
    speculative decoding equal. The repetition penalty (Hugging Face's rule) counts prompt, output
    and path, each token once; presence and frequency penalties (OpenAI's rule) count output and
    path.
    """
    if not params.edits_logits:
        return logits
    edited = logits.copy()
    if params.penalises:
        ids = history.ids
        edited[ids] = _penalised(logits[ids], history.generated_counts(ids), params)
        if path_ids:
            path = Counter(path_ids)
            ids = np.fromiter(path.keys(), np.int64, len(path))
            counts = np.fromiter(path.values(), np.int32, len(path))
            counts += history.generated_counts(ids)
            edited[ids] = _penalised(logits[ids], counts, params)
    if params.logit_bias:
        ids, values = params.bias_arrays
        edited[ids] += values
    return edited


def _penalised(values: Float32s, counts: NDArray[np.int32], params: SamplingParams) -> Float32s:
    """Return the penalized logits [n] of tokens that occurred before.

    counts: int32 [n], how often each token occurred in the output.
    """
    repetition = params.repetition_penalty
    if repetition != 1.0:
        with np.errstate(over="ignore"):
            values = np.where(values > 0, values / repetition, values * repetition)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        times = counts.astype(np.float32)
        values = values - (
            params.presence_penalty * (times > 0).astype(np.float32)
            + params.frequency_penalty * times
        )
    return values


def target_probs(
    logits: Float32s, history: TokenHistory, path_ids: Sequence[int], params: SamplingParams
) -> Float32s:
    """Turn the logits float32 [V] of one node into its distribution p, float32 [V] with sum 1.

    The order is `edit_logits`, temperature, top-k, top-p, min-p, softmax. Each filter works on the
    renormalized result of the filter before it. Tokens that tie at a boundary are all kept, so p
    does not depend on a sort order. In greedy mode, the argmax (the lowest id, if tied) gets all
    the mass. Raises EngineError if a logit is NaN or +inf, or if no logit is finite.
    """
    edited = edit_logits(logits, history, path_ids, params)
    peak = _finite_peak(edited)
    if params.greedy:
        p = np.zeros_like(edited)
        p[edited.argmax()] = 1.0
        return p
    if params.top_k and params.top_k < edited.size:
        kth = np.partition(edited, edited.size - params.top_k)[edited.size - params.top_k]
        kept = np.flatnonzero(edited >= kth)
        p = np.zeros_like(edited)
        p[kept] = _warped(edited[kept], peak, params)
        return p
    return _warped(edited, peak, params)


def _finite_peak(logits: Float32s) -> np.float32:
    """Return the largest logit. Raises EngineError if it is not finite.

    One pass also detects NaN and +inf, because max propagates both.
    """
    with np.errstate(invalid="ignore"):
        peak: np.float32 = logits.max()
    if np.isfinite(peak):
        return peak
    num_nan, num_inf = int(np.isnan(logits).sum()), int(np.isposinf(logits).sum())
    what = "NaN" if num_nan else "+inf" if num_inf else "-inf everywhere"
    raise EngineError(
        f"target logits are {what} ({num_nan} NaN and {num_inf} +inf of {logits.size}), so no "
        "token can be chosen. The target engine computed wrong values: check its precision, or "
        "export it again"
    )


def _warped(logits: Float32s, peak: np.float32, params: SamplingParams) -> Float32s:
    """Apply temperature, softmax, top-p and min-p to logits [C]; `peak` is the largest logit."""
    p = _softmax(logits, peak, params.temperature)
    if params.top_p is not None and params.top_p < 1.0:
        p *= p >= _nucleus_threshold(p, params.top_p)
        p /= p.sum()
    if params.min_p:
        p *= p >= params.min_p * p.max()
        p /= p.sum()
    return p


def _softmax(logits: Float32s, peak: np.float32, temperature: float) -> Float32s:
    """Return the float32 softmax of logits [C] at `temperature`.

    The peak is subtracted first, so the result is finite at any temperature.
    """
    p: Float32s = logits - peak
    if temperature != 1.0:
        # Temperatures below float32's smallest normal number give the same result as that number:
        # all mass on the peak.
        with np.errstate(over="ignore"):
            p /= max(temperature, float(np.finfo(np.float32).tiny))
    np.exp(p, out=p)
    p /= p.sum()
    return p


def _nucleus_threshold(p: Float32s, top_p: float) -> np.float32:
    """Return the smallest probability in the smallest set of p [C] whose mass reaches top_p.

    Sorting a whole vocabulary takes milliseconds. Therefore the boundary is bracketed first
    (bisection of log p, by mass), and only the values inside the bracket are sorted.
    """
    missing = top_p * float(p.sum(dtype=np.float64))
    # The values dropped here add up to at most half of 1 - top_p, so the boundary is above them.
    rest = p[p >= 0.5 * (1.0 - top_p) / p.size]
    low, high = np.float32(rest.min()), np.nextafter(np.float32(rest.max()), np.float32(np.inf))
    num_from_low, num_from_high, mass_from_high = rest.size, 0, 0.0
    for _ in range(_MOST_BISECTIONS):
        pivot = np.float32(np.sqrt(float(low) * float(high)))
        if num_from_low - num_from_high <= _SORT_AT_ONCE or not low < pivot < high:
            break
        above = rest >= pivot
        mass = float((rest * above).sum(dtype=np.float64))
        if mass >= missing:
            low, num_from_low = pivot, int(np.count_nonzero(above))
        else:
            high, num_from_high, mass_from_high = pivot, int(np.count_nonzero(above)), mass
    inside = np.sort(rest[(rest >= low) & (rest < high)])[::-1]
    reached = np.searchsorted(mass_from_high + np.cumsum(inside, dtype=np.float64), missing)
    boundary: np.float32 = inside[min(int(reached), inside.size - 1)]
    return boundary


def sample_inverse_cdf(p: NDArray[np.floating], u: float) -> int:
    """Return the token at which the cumulative sum of p [V] passes u in [0, 1), as a Python int.

    Sums are float64 and p need not be normalized. A token of probability 0 is never returned, even
    if u is next to 1. A large V is summed in blocks first, because one cumulative sum over all of
    it is ten times slower.
    """
    if p.size <= _BLOCK:
        cumulative = np.cumsum(p, dtype=np.float64)
        return _first_above(cumulative, u * cumulative[-1])
    edges = np.cumsum(_block_sums(p))
    target = u * edges[-1]
    block = _first_above(edges, target)
    if block:
        target -= edges[block - 1]
    start = block * _BLOCK
    return start + _first_above(np.cumsum(p[start : start + _BLOCK], dtype=np.float64), target)


def _block_sums(p: NDArray[np.floating]) -> NDArray[np.float64]:
    whole = p.size - p.size % _BLOCK
    sums: NDArray[np.float64] = p[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
    return sums if whole == p.size else np.append(sums, p[whole:].sum(dtype=np.float64))


def _first_above(cumulative: NDArray[np.float64], target: float) -> int:
    """Return the first index whose sum exceeds `target`.

    If rounding leaves no such index, return the last index that added mass.
    """
    assert cumulative[-1] > 0.0, "p has no mass"
    index = int(cumulative.searchsorted(target, side="right"))
    if index < cumulative.size:
        return index
    return int(cumulative.searchsorted(cumulative[-1]))


class CoupledUniforms:
    """The numbers u_t of the `coupled` rule: a function of seed and position only.

    The generator is Philox4x64 with key (seed, 1). Positions 256 b to 256 b + 255 use the first 256
    words at counter word 1 = b, and u = (word >> 11) * 2**-53. The result does not depend on
    earlier calls, so neither the drafter nor the number of tokens that a round accepts changes the
    text.
    """

    def __init__(self, seed: int) -> None:
        self._key = np.array([seed, _COUPLED_STREAM], np.uint64)
        self._block = -1  # the cached block; the positions of a round are neighbors
        self._uniforms: list[float] = []

    def uniform(self, position: int) -> float:
        """Return the number in [0, 1) for the token at sequence position `position` (>= 0)."""
        block, offset = divmod(position, _UNIFORMS_PER_BLOCK)
        if block != self._block:
            counter = np.array([0, block, 0, 0], np.uint64)
            words = np.random.Philox(key=self._key, counter=counter).random_raw(_UNIFORMS_PER_BLOCK)
            self._uniforms = ((words >> np.uint64(11)) * 2.0**-53).tolist()
            self._block = block
        return self._uniforms[offset]


def rejection_rng(seed: int) -> np.random.Generator:
    """Return the generator of the `rejection` rule: Philox with key (seed, 2), its own stream."""
    key = np.array([seed, _REJECTION_STREAM], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def log_softmax(logits: Float32s) -> Float32s:
    """Return float32 log-probabilities over the last axis of logits [..., V].

    A row that contains NaN or +inf becomes NaN.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        shifted: Float32s = logits - logits.max(axis=-1, keepdims=True)
        shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def draft_probs(logits: Float32s, temperature: float) -> Float32s | None:
    """Return the distribution q float32 [Vd] from which draft tokens are sampled.

    temperature: above 0. Returns None if any logit is NaN or infinite; the tree then ends there,
    but the request continues.
    """
    if not np.isfinite(logits).all():
        return None
    return _softmax(logits, logits.max(), temperature)

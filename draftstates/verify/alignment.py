"""Alignment of final states with the next tokens that the server returned.

The head, applied to a sample's last state, must give the log probabilities that the server
returned. Of every row of a prefix recapture the server returns those of three tokens: their
differences are differences of logits, which need three rows of the head and not all of it.
Where r_N is captured, the final state of every row must be its norm.

The limit of disagreement is not chosen; it follows from the number and the size of the roundings:

- The server rounds each logit to the dtype that it computes in: by half a step h(z) at most. Where
  it scales the logit, it rounds it once more; where it caps it, both roundings shrink with the
  cap's slope, and the cap itself is computed in float32. A log
  probability is the logit less the mean of all under the softmax (to first order), so it moves by
  (1 - p) h + (the mean of the others' h) at most: little for the most likely token, which is what
  tells whole chats apart that all end in the same token.
- Where states are stored coarser than they were computed, or the norm lies in between, each
  rounding moves a value x by at most u |x|, evenly spread: a standard deviation of u |x| / sqrt(3).
  Such errors sum as sqrt(sum of squares), here over the weights' distance from their mean under the
  softmax. A sum of evenly spread errors is past `_DEVIATIONS` standard deviations less than once in
  10^10.
- Both sides sum H products in float32, in another order: sqrt(H) 2^-24 |w| |x|, `_SUMS` times. So
  they do with the exponentials of V logits: sqrt(V) 2^-24. Then each rounds the sum's logarithm and
  its difference from the logit.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch

from draftstates.model.family import LogitForm
from draftstates.model.final_norm import FinalNorm
from draftstates.model.head import Head
from draftstates.shards.layout import Shard
from draftstates.spec import CaptureSpec, torch_dtype
from draftstates.verify.checks import Finding

_DEVIATIONS = 7.0
# Two sums, each within twice its expected error.
_SUMS = 4.0
# A logarithm and a difference on each side.
_LOGARITHMS = 4
# A quotient, a tanh and a product on each side.
_CAP_ROUNDINGS = 6
# Samples whose logits are in memory at once.
_BATCH = 256
# Roundings of a logit of any row: a kernel may round the sum of parts, too. Of many rows, some
# come as near to this limit as two values that round apart.
_ROW_ROUNDINGS = 2
# Rows of prefix recaptures that are compared at once.
_ROWS = 512
# Values that are normed at once: they stay in the processor's cache.
_NORMED = 1 << 18
# Of r_N, its normed value, the weight, the product, a factor, the stored row; and a few to spare.
_FINAL_ROUNDINGS = 8
# The stored r_N, the normed value, and its product with the weight.
_NORM_ROUNDINGS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounding:
    """Roundings of the numbers between the server's logits and the stored state.

    Attributes:
        compute: dtype of the server's numbers.
        stored: dtype of the file's numbers.
        normed: whether the stored state is already normed.
    """

    compute: torch.dtype
    stored: torch.dtype
    normed: bool

    @classmethod
    def of(cls, spec: CaptureSpec) -> "Rounding":
        """Return the rounding of a capture."""
        return cls(
            compute=torch_dtype(spec.compute_dtype),
            stored=torch_dtype(spec.stored_dtype),
            normed=spec.final_norm == "post_norm",
        )

    @property
    def largest(self) -> float:
        """Largest relative error of one rounding."""
        return max(unit_roundoff(self.compute), unit_roundoff(self.stored))

    @property
    def state_variance(self) -> float:
        """Variance of a head's input relative to its square.

        It covers all roundings that are not in the server's own logits.
        """
        compute, stored = unit_roundoff(self.compute), unit_roundoff(self.stored)
        roundings = [stored] if stored > compute else []
        roundings += [] if self.normed else [compute] * _NORM_ROUNDINGS
        return sum(u * u / 3 for u in roundings)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Log probabilities that the head gives for S samples.

    Attributes:
        asked: log probabilities of the returned tokens, float32 [S, n].
        limit: largest change of each by rounding, [S, n].
        best: the n largest log probabilities, descending, [S, n].
        best_limit: largest change of each of `best` by rounding, [S, n].
    """

    asked: torch.Tensor
    limit: torch.Tensor
    best: torch.Tensor
    best_limit: torch.Tensor


def check_alignment(
    sample_ids: Sequence[str],
    states: torch.Tensor,
    top: Sequence[Sequence[Sequence[float]]],
    *,
    head: Head,
    rounding: Rounding,
) -> tuple[list[Finding], dict[str, float]]:
    """Compare the last final state of each sample with the top tokens that the server returned.

    Args:
        sample_ids: S sample ids.
        states: the final state of each sample's last token, stored dtype [S, H].
        top: n pairs (token id, log probability) for each sample, with the same n.

    Returns:
        findings, and by sample id the largest disagreement as a share of its limit.
    """
    findings: list[Finding] = []
    largest: dict[str, float] = {}
    for first in range(0, len(sample_ids), _BATCH):
        part = slice(first, first + _BATCH)
        pairs = torch.tensor(top[part], dtype=torch.float64)
        tokens, returned = pairs[..., 0].long(), pairs[..., 1].float()
        found = logprobs(states[part], tokens, head=head, rounding=rounding)
        shares = torch.cat(
            [(found.asked - returned).abs() / found.limit, _ranked(found, returned)], dim=1
        )
        largest |= zip(sample_ids[part], shares.max(dim=1).values.tolist(), strict=True)
        # A NaN is bad too.
        bad = ~(shares <= 1).all(dim=1)
        for index in torch.nonzero(bad).flatten().tolist():
            findings.append(
                _finding(sample_ids[first + index], tokens[index], returned[index], found, index)
            )
    return findings, largest


def check_rows(
    name: str,
    states: torch.Tensor,
    next_tokens: Sequence[Sequence[Sequence[float]]],
    *,
    head: Head,
    rounding: Rounding,
) -> tuple[list[Finding], float]:
    """Compare every final state of a prefix recapture with the next tokens that were returned.

    Args:
        name: the sample's id.
        states: the final states, stored dtype [n, H].
        next_tokens: of each, m pairs (token id, log probability), the most likely one first.

    Returns:
        the first row at fault, and the largest disagreement as a share of its limit.
    """
    largest = 0.0
    for first in range(0, len(states), _ROWS):
        part = slice(first, first + _ROWS)
        pairs = torch.tensor(next_tokens[part], dtype=torch.float64)
        tokens, returned = pairs[..., 0].long(), pairs[..., 1].float()
        found, limit = _leads(states[part], tokens, returned, head=head, rounding=rounding)
        lead = returned[:, 1:] - returned[:, :1]
        shares = (found - lead).abs() / limit
        # A NaN is bad too.
        bad = torch.nonzero(~(shares <= 1))
        if len(bad):
            row, other = bad[0].tolist()
            detail = (
                f"row {first + row} of its prefix recapture is not this token's: token"
                f" {tokens[row, other + 1]} over token {tokens[row, 0]}: {lead[row, other]:.3f}"
                f" returned, {found[row, other]:.3f} from the state (limit {limit[row, other]:.3f})"
            )
            return [Finding(check="alignment", sample_id=name, detail=detail)], math.inf
        largest = max(largest, shares.max().item())
    return [], largest


def check_final(
    shard: Shard, index: int, *, layer: int, norm: FinalNorm | None, rounding: Rounding
) -> tuple[list[Finding], float]:
    """Compare the final state of every row of a sample with r_N; shared rows are others' own.

    Args:
        layer: position of r_N among the captured layers.
        norm: the model's final norm; None where the final state is r_N itself.

    Returns:
        the first row at fault, and the largest distance as a share of its limit.
    """
    first, end = shard.rows(index)
    shared = shard.segments.shared(index)
    step = max(1, _NORMED // shard.header.tensors["final_hidden_state"][1][1])
    largest, limit = 0.0, _FINAL_ROUNDINGS * rounding.largest if norm else 0.0
    for start in range(first, end, step):
        stop = min(start + step, end)
        last = shard.state_rows("hidden_states", start, stop)[:, layer].float()
        final = shard.state_rows("final_hidden_state", start, stop).float()
        expected, limits = last, torch.zeros(len(last))
        if norm:
            expected, limits = norm(last), limit * norm.sensitivity(last)
        distances = (final - expected).norm(dim=-1) / expected.norm(dim=-1)
        # What is not finite is a fault of the values.
        bad = torch.nonzero(distances > limits).flatten().tolist()
        if bad:
            row = bad[0]
            detail = (
                f"row {shared + start - first + row}: the final state differs from"
                f" {'the norm of ' if norm else ''}r_{shard.header.residual_layers[layer]} by"
                f" {distances[row]:.3g} of a row's norm (limit {limits[row]:.3g})"
            )
            name = shard.header.sample_ids[index]
            return [Finding(check="alignment", sample_id=name, detail=detail)], math.inf
        if norm:
            largest = max(largest, (distances / limits).nan_to_num().max().item())
    return [], largest


def _leads(
    states: torch.Tensor,
    tokens: torch.Tensor,
    returned: torch.Tensor,
    *,
    head: Head,
    rounding: Rounding,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return by how much logits exceed the first one, and the largest change of that by rounding.

    Args:
        states: final states as stored, [n, H].
        tokens: tokens of the logits, int64 [n, m].
        returned: their log probabilities by the server, [n, m].

    Returns:
        two tensors [n, m - 1].
    """
    inputs = head.inputs(states)
    products = head.weight[tokens].to(rounding.compute).float() * inputs[:, None]
    logits = head.form(products.sum(dim=-1))
    slopes = head.form.slope(logits)
    limit = (
        _ROW_ROUNDINGS * _logit_step(logits, head.form, rounding.compute)
        + _SUMS * math.sqrt(inputs.shape[1]) * 2**-24 * slopes.abs() * products.abs().sum(dim=-1)
        + _LOGARITHMS * half_step(torch.maximum(logits.abs(), returned.abs()), torch.float32)
    )
    limit = limit[:, 1:] + limit[:, :1]
    if rounding.state_variance:
        sloped = slopes[..., None] * products
        limit = limit + (sloped[:, 1:] - sloped[:, :1]).norm(dim=-1) * (
            _DEVIATIONS * math.sqrt(rounding.state_variance)
        )
    return logits[:, 1:] - logits[:, :1], limit


def _ranked(found: Logprobs, returned: torch.Tensor) -> torch.Tensor:
    """Compare the n best tokens of both sides, each side in its own order.

    The server must not have left out a better token. The k best tokens of one side are, on the
    other side, at most their rounding worse than its k-th token. So the k-th tokens of both sides
    are as near.
    """
    limit = torch.cat([found.limit, found.best_limit], dim=1).max(dim=1, keepdim=True).values
    return (found.best - returned.sort(dim=1, descending=True).values).abs() / limit


def _finding(
    name: str, tokens: torch.Tensor, returned: torch.Tensor, found: Logprobs, index: int
) -> Finding:
    rows = zip(
        tokens.tolist(),
        returned.tolist(),
        found.asked[index].tolist(),
        found.limit[index].tolist(),
        strict=True,
    )
    parts = [
        f"token {token}: {there:.3f} returned, {here:.3f} from the state (limit {limit:.3f})"
        for token, there, here, limit in rows
    ]
    return Finding(
        check="alignment",
        sample_id=name,
        detail="the last state is not this sample's: " + "; ".join(parts),
    )


def logprobs(
    states: torch.Tensor, tokens: torch.Tensor, *, head: Head, rounding: Rounding
) -> Logprobs:
    """Return log probabilities of the next token from final states.

    Args:
        states: final states as stored, [S, H].
        tokens: tokens to ask for, int64 [S, n].
    """
    inputs = head.inputs(states)
    logits = head.logits(inputs, dtype=rounding.compute)
    total = logits.logsumexp(dim=1, keepdim=True)
    best = logits.topk(tokens.shape[1], dim=1)
    both = torch.cat([tokens, best.indices], dim=1)
    limit, best_limit = _limits(inputs, logits, total, both, head=head, rounding=rounding).chunk(
        2, dim=1
    )
    return Logprobs(
        asked=logits.gather(1, tokens) - total,
        limit=limit,
        best=best.values - total,
        best_limit=best_limit,
    )


def _limits(
    inputs: torch.Tensor,
    logits: torch.Tensor,
    total: torch.Tensor,
    tokens: torch.Tensor,
    *,
    head: Head,
    rounding: Rounding,
) -> torch.Tensor:
    """Return the largest change of each asked log probability by rounding, [S, n]."""
    asked = logits.gather(1, tokens)
    share = (asked - total).exp()
    steps = _logit_step(asked, head.form, rounding.compute)
    probabilities = (logits - total).exp()
    mean_step = (probabilities * _logit_step(logits, head.form, rounding.compute)).sum(
        dim=1, keepdim=True
    )
    logit_part = ((1 - share) * steps + (mean_step - share * steps).clamp(min=0)) * (
        2 * steps.max(dim=1, keepdim=True).values
    ).exp()
    # [S, n, H]
    weights = head.weight[tokens].to(rounding.compute).float()
    sum_part = (_SUMS * math.sqrt(inputs.shape[1]) * 2**-24 * head.form.slope(asked).abs()) * (
        weights * inputs[:, None]
    ).abs().sum(dim=-1)
    largest = torch.maximum(total.abs(), (asked - total).abs())
    softmax_part = _SUMS * math.sqrt(logits.shape[1]) * 2**-24 + _LOGARITHMS * half_step(
        largest, torch.float32
    )
    state_part = torch.zeros_like(asked)
    if rounding.state_variance:
        mean = torch.zeros_like(inputs)
        slopes = head.form.slope(logits)
        for rows, weight in head.blocks(rounding.compute):
            mean += (probabilities * slopes)[:, rows] @ weight
        sloped = head.form.slope(asked)[..., None] * weights
        state_part = ((sloped - mean[:, None]) * inputs[:, None]).norm(dim=-1) * (
            _DEVIATIONS * math.sqrt(rounding.state_variance)
        )
    return (
        logit_part + state_part + softmax_part + sum_part + sum_part.max(dim=1, keepdim=True).values
    )


def _logit_step(logits: torch.Tensor, form: LogitForm, dtype: torch.dtype) -> torch.Tensor:
    """Return the largest change of each logit by the server's roundings of it."""
    product, slope = form.product(logits), form.slope(logits).abs()
    step = slope * half_step(product, dtype)
    if form.scale != 1:
        step = step + slope / abs(form.scale) * half_step(product * form.scale, dtype)
    if form.cap is not None:
        step = step + _CAP_ROUNDINGS * half_step(logits, torch.float32)
    return step


def half_step(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return half the distance between neighbouring numbers of `dtype` around each value.

    This is the largest change by rounding.
    """
    _, exponent = torch.frexp(values)
    # Below the normal numbers the steps are constant.
    smallest = torch.finfo(dtype).smallest_normal * unit_roundoff(dtype)
    return torch.ldexp(torch.full_like(values, unit_roundoff(dtype) / 2), exponent).clamp(
        min=smallest
    )

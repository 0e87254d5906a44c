"""Whether a sample's last state is its own: the head applied to it must give the log probabilities that the server returned.

The limit of disagreement is no chosen number; it follows from how often, and how finely, values were rounded:

- The server rounds each logit to the dtype that it computes in: by half a step h(z) at most. A log probability is the logit less
  the mean of all under the softmax (to first order), so it moves by (1 - p) h + (the mean of the others' h) at most: little for
  the most likely token, which is what tells whole chats apart that all end in the same token.
- Where states are stored coarser than they were computed, or the norm lies in between, each rounding moves a value x by at most
  u |x|, evenly spread: a standard deviation of u |x| / sqrt(3). Such errors sum as sqrt(sum of squares), here over the weights'
  distance from their mean under the softmax. A sum of evenly spread errors is past `_DEVIATIONS` standard deviations less than
  once in 10^10.
- Both sides sum H products in float32, in another order: sqrt(H) 2^-24 |w| |x|, `_SUMS` times. So they do with the exponentials
  of V logits: sqrt(V) 2^-24. Then each rounds the sum's logarithm and its difference from the logit.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from draftstates.capture_spec import torch_dtype
from draftstates.checks import Finding
from draftstates.model import Head

_DEVIATIONS = 7.0
_SUMS = 4.0  # two sums, each within twice its expected error
_LOGARITHMS = 4  # a logarithm and a difference on each side
_BATCH = 256  # samples whose logits are held at once
_BLOCK = 8192  # rows of the head that are widened to float32 at once
_NORM_ROUNDINGS = 3  # r_N when stored, the normed value, and its product with the weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounding:
    """How the numbers were rounded between the server's logits and the stored state.

    Attributes:
        compute, stored: dtypes of the server's numbers and of the file's; normed: whether the stored state is already normed.
    """

    compute: torch.dtype
    stored: torch.dtype
    normed: bool

    @classmethod
    def of(cls, capture: dict[str, Any]) -> "Rounding":
        """That of a plan's `capture`."""
        dtypes = (torch_dtype(capture[name]) for name in ("compute_dtype", "stored_dtype"))
        return cls(**dict(zip(("compute", "stored"), dtypes, strict=True)), normed=capture["final_norm"] == "post_norm")

    @property
    def state_variance(self) -> float:
        """Variance of a head's input relative to its square, over all roundings that the server's own logits did not see."""
        compute, stored = unit_roundoff(self.compute), unit_roundoff(self.stored)
        roundings = [stored] if stored > compute else []
        roundings += [] if self.normed else [compute] * _NORM_ROUNDINGS
        return sum(u * u / 3 for u in roundings)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logprobs:
    """What the head gives for S samples.

    Attributes:
        asked: log probabilities of the tokens that were asked for, float32 [S, n]; limit: how far rounding may move each.
        best: the n largest log probabilities, descending, [S, n]; best_limit: how far rounding may move each of those tokens'.
    """

    asked: torch.Tensor
    limit: torch.Tensor
    best: torch.Tensor
    best_limit: torch.Tensor


def check_alignment(
    names: Sequence[str], states: torch.Tensor, top: Sequence[Sequence[Sequence[float]]], *, head: Head, rounding: Rounding
) -> tuple[list[Finding], float]:
    """Hold the last final state of each sample to the top tokens that the server returned for it.

    Args:
        names: S sample ids.
        states: the final state of each sample's last token, stored dtype [S, H].
        top: of each sample, n pairs (token id, log probability), as many for each.

    Returns:
        findings, and the largest disagreement as a share of its limit.
    """
    findings: list[Finding] = []
    worst = 0.0
    for first in range(0, len(names), _BATCH):
        part = slice(first, first + _BATCH)
        pairs = torch.tensor(top[part], dtype=torch.float64)
        tokens, returned = pairs[..., 0].long(), pairs[..., 1].float()
        found = logprobs(states[part], tokens, head=head, rounding=rounding)
        shares = torch.cat([(found.asked - returned).abs() / found.limit, _ranked(found, returned)], dim=1)
        worst = max(worst, shares.max().item())
        bad = ~(shares <= 1).all(dim=1)  # a NaN is bad too
        for index in torch.nonzero(bad).flatten().tolist():
            findings.append(_finding(names[first + index], tokens[index], returned[index], found, index))
    return findings, worst


def _ranked(found: Logprobs, returned: torch.Tensor) -> torch.Tensor:
    """The n best of both sides, each in its own order: no better token may be missing from what the server returned.

    The k best of one side are, on the other, no worse than its k-th less what rounding moves them: so the k-th of both are as near.
    """
    limit = torch.cat([found.limit, found.best_limit], dim=1).max(dim=1, keepdim=True).values
    return (found.best - returned.sort(dim=1, descending=True).values).abs() / limit


def _finding(name: str, tokens: torch.Tensor, returned: torch.Tensor, found: Logprobs, index: int) -> Finding:
    rows = zip(tokens.tolist(), returned.tolist(), found.asked[index].tolist(), found.limit[index].tolist(), strict=True)
    parts = [f"token {token}: {there:.3f} returned, {here:.3f} from the state (limit {limit:.3f})" for token, there, here, limit in rows]
    return Finding(check="alignment", sample_id=name, detail="the last state is not this sample's: " + "; ".join(parts))


def logprobs(states: torch.Tensor, tokens: torch.Tensor, *, head: Head, rounding: Rounding) -> Logprobs:
    """Log probabilities of the next token from final states.

    Args:
        states: [S, H] as stored; tokens: int64 [S, n].
    """
    inputs = states.float() if head.norm is None else head.norm(states.float())
    logits = torch.empty(len(states), len(head.weight))
    for rows, weight in _blocks(head, rounding):
        logits[:, rows] = inputs @ weight.T
    total = logits.logsumexp(dim=1, keepdim=True)
    best = logits.topk(tokens.shape[1], dim=1)
    both = torch.cat([tokens, best.indices], dim=1)
    limit, best_limit = _limits(inputs, logits, total, both, head=head, rounding=rounding).chunk(2, dim=1)
    return Logprobs(asked=logits.gather(1, tokens) - total, limit=limit, best=best.values - total, best_limit=best_limit)


def _limits(
    inputs: torch.Tensor, logits: torch.Tensor, total: torch.Tensor, tokens: torch.Tensor, *, head: Head, rounding: Rounding
) -> torch.Tensor:
    """How far rounding may move each asked log probability, [S, n]; see the module's text."""
    asked = logits.gather(1, tokens)
    share = (asked - total).exp()
    steps = half_step(asked, rounding.compute)
    probabilities = (logits - total).exp()
    mean_step = (probabilities * half_step(logits, rounding.compute)).sum(dim=1, keepdim=True)
    logit_part = ((1 - share) * steps + (mean_step - share * steps).clamp(min=0)) * (2 * steps.max(dim=1, keepdim=True).values).exp()
    weights = head.weight[tokens].to(rounding.compute).float()  # [S, n, H]
    sum_part = _SUMS * math.sqrt(inputs.shape[1]) * 2**-24 * (weights * inputs[:, None]).abs().sum(dim=-1)
    largest = torch.maximum(total.abs(), (asked - total).abs())
    softmax_part = _SUMS * math.sqrt(logits.shape[1]) * 2**-24 + _LOGARITHMS * half_step(largest, torch.float32)
    state_part = torch.zeros_like(asked)
    if rounding.state_variance:
        mean = torch.zeros_like(inputs)
        for rows, weight in _blocks(head, rounding):
            mean += probabilities[:, rows] @ weight
        state_part = ((weights - mean[:, None]) * inputs[:, None]).norm(dim=-1) * (_DEVIATIONS * math.sqrt(rounding.state_variance))
    return logit_part + state_part + softmax_part + sum_part + sum_part.max(dim=1, keepdim=True).values


def half_step(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance between neighbouring numbers of `dtype` around each value: what rounding moves it by at most."""
    _, exponent = torch.frexp(values)
    smallest = torch.finfo(dtype).smallest_normal * unit_roundoff(dtype)  # below the normal numbers steps shrink no further
    return torch.ldexp(torch.full_like(values, unit_roundoff(dtype) / 2), exponent).clamp(min=smallest)


def _blocks(head: Head, rounding: Rounding) -> Iterator[tuple[slice, torch.Tensor]]:
    """The head's weight a block of rows at a time: as the server holds it, widened to float32."""
    for first in range(0, len(head.weight), _BLOCK):
        rows = slice(first, first + _BLOCK)
        yield rows, head.weight[rows].to(rounding.compute).float()

"""Agreement of answers with their captured states, at every sampled token.

The server that answered reported the log probability of each token that it sampled. The captured
final state of the token before, through the model's head, must give the same. So a template, a
model or an adapter that differs between the two servers is found, as is a row out of its place.

The two servers sum in other orders: one decodes token by token on cached rows, the other computes
whole prompts. Largest and median difference of SmolLM2's tokens, and the limits:

| computed, stored | median | largest | typical | worst |
| --- | --- | --- | --- | --- |
| float32, float32 | 0.0000015 | 0.000037 | 0.0001 | 0.001 |
| float32, bfloat16 | 0.0006 | 0.049 | 0.01 | 0.5 |
| bfloat16, bfloat16 | 0.016 | 0.22 | 0.05 | 2 |
| float32, bfloat16, the row before | 14 | 34 | | |

The figures of bfloat16 are those of transformers, decoding with a cache against the whole, on 64
tokens; a server in bfloat16 and mixtures of experts were not measured.

A temperature below 1 divides the logits, and so enlarges their rounding: the limits are as many
times larger. Every token must lie within `worst`. Half of the tokens of a shard, and of each sample
that has enough, must lie within `typical`: a small difference of all rows shows in the median
alone. At temperature 0, the sampled token is the most likely one, or as likely within `worst`.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from draftstates.model.head import Head
from draftstates.plan.shard_tokens import SampledTokens
from draftstates.shards.layout import Shard
from draftstates.verify.alignment import Rounding
from draftstates.verify.checks import Finding

# by the coarser of the two formats, and by that of the computation: (typical, worst)
_STORED = {torch.float32: (1e-4, 1e-3), torch.float16: (2e-3, 0.1), torch.bfloat16: (0.01, 0.5)}
_COMPUTED = {torch.float32: (1e-4, 1e-3), torch.float16: (0.01, 0.5), torch.bfloat16: (0.05, 2.0)}
# tokens of a sample whose median says something of it
_ENOUGH = 32
# rows whose logits are computed at once, a block of the vocabulary at a time
_BATCH = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerLimits:
    """Largest differences of log probabilities: of half of the tokens, and of every token."""

    typical: float
    worst: float

    @classmethod
    def of(cls, rounding: Rounding, worst: float | None = None) -> "AnswerLimits":
        """Return the limits of a capture's number formats.

        Args:
            rounding: the number formats.
            worst: the configured limit, `checks.answers`; `typical` keeps its proportion to it.
        """
        typical, largest = map(
            max, zip(_STORED[rounding.stored], _COMPUTED[rounding.compute], strict=True)
        )
        factor = 1.0 if worst is None else worst / largest
        return cls(typical=typical * factor, worst=largest * factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tokens:
    """Sampled tokens of a sample.

    Attributes:
        states: final state of the token before each, [n, H].
        tokens: the tokens, int64 [n].
    """

    name: str
    states: torch.Tensor
    tokens: torch.Tensor
    said: SampledTokens

    @property
    def spread(self) -> float:
        """How many times larger than at temperature 1 a difference may be."""
        return 1 / min(self.said.temperature or 1.0, 1.0)


def check_answers(
    file: Shard,
    sampled: Mapping[str, SampledTokens],
    *,
    head: Head,
    rounding: Rounding,
    limits: AnswerLimits,
) -> tuple[list[Finding], dict[str, float], int]:
    """Compare every sampled token of a shard.

    Args:
        file: the shard.
        sampled: what the server that answered said, by sample id.

    Returns:
        findings; by sample id the largest difference as a share of its limit; and the number of
        compared tokens.
    """
    findings: list[Finding] = []
    found: list[_Tokens] = []
    for index in range(len(file)):
        try:
            found.append(_sampled(file, index, sampled))
        except ValueError as error:
            name = file.header.sample_ids[index]
            findings.append(Finding(check="answers", sample_id=name, detail=str(error)))
    shares, everything = {}, []
    for each, differences, gaps in _compared(found, head, rounding):
        findings += _faults(each, differences, gaps, limits)
        shares[each.name] = float(differences.max()) / limits.worst
        everything.append(differences)
    if everything and (median := float(torch.cat(everything).median())) > limits.typical:
        detail = (
            f"the two servers differ: expected half of the log probabilities within"
            f" {limits.typical:.2g}, found a median difference of {median:.2g}: the model, its"
            " head, the prompts or the temperature were others when the answers were sampled"
        )
        findings.append(Finding(check="answers", sample_id=None, detail=detail))
    return findings, shares, sum(map(len, everything))


def _sampled(file: Shard, index: int, sampled: Mapping[str, SampledTokens]) -> _Tokens:
    """Return the sampled tokens of a sample.

    Raises:
        ValueError: it has other sampled tokens than the server that answered said.
    """
    input_ids, loss_mask = file.tokens(index)
    name = file.header.sample_ids[index]
    places = np.flatnonzero(loss_mask)
    said = sampled.get(name)
    if said is None or len(said.logprobs) != len(places) or not len(places) or not places[0]:
        count = "none" if said is None else len(said.logprobs)
        raise ValueError(
            f"expected a log probability for each of {len(places)} sampled tokens, found {count}"
        )
    states = file.sample_rows("final_hidden_state", index)
    ids = input_ids[places].astype(np.int64)
    return _Tokens(
        name=name,
        states=states[torch.from_numpy(places - 1)],
        tokens=torch.from_numpy(ids),
        said=said,
    )


def _compared(
    found: list[_Tokens], head: Head, rounding: Rounding
) -> Iterator[tuple[_Tokens, torch.Tensor, torch.Tensor]]:
    """Yield the differences of each sample's log probabilities, as they would be at temperature 1,
    and its tokens' gaps to the best.

    Samples are computed together, since each batch widens the whole head.
    """
    batch: list[_Tokens] = []
    rows = 0
    for each in [*found, None]:
        if batch and (each is None or rows + len(each.tokens) > _BATCH):
            lengths = [len(item.tokens) for item in batch]
            temperatures = torch.tensor([item.said.temperature or 1.0 for item in batch])
            logprobs, gaps = _logprobs(
                torch.cat([item.states for item in batch]),
                torch.cat([item.tokens for item in batch]),
                temperatures.repeat_interleave(torch.tensor(lengths)),
                head=head,
                rounding=rounding,
            )
            for item, own, gap in zip(
                batch, logprobs.split(lengths), gaps.split(lengths), strict=True
            ):
                said = torch.from_numpy(item.said.logprobs.astype(np.float32))
                # not a number is a fault too
                difference = (own - said).abs().nan_to_num(nan=torch.inf)
                yield item, difference / item.spread, gap
            batch, rows = [], 0
        if each is not None:
            batch.append(each)
            rows += len(each.tokens)


def _logprobs(
    states: torch.Tensor,
    tokens: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    head: Head,
    rounding: Rounding,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log probability of each token, and how much larger the largest logit is.

    Args:
        states: final states as stored, [n, H].
        tokens: a token for each state, int64 [n].
        temperatures: what the logits are divided by, [n].
    """
    asked = torch.full((len(tokens),), -torch.inf)
    total, best = asked.clone(), asked.clone()
    for part in range(0, len(tokens), _BATCH):
        here = slice(part, part + _BATCH)
        inputs = head.inputs(states[here])
        for rows, weight in head.blocks(rounding.compute):
            logits = head.form(inputs @ weight.T) / temperatures[here, None]
            total[here] = torch.logaddexp(total[here], logits.logsumexp(dim=1))
            best[here] = torch.maximum(best[here], logits.max(dim=1).values)
            inside = (tokens[here] >= rows.start) & (tokens[here] < rows.start + len(weight))
            place = (tokens[here] - rows.start).clamp(0, len(weight) - 1)
            picked = logits.gather(1, place[:, None])[:, 0]
            asked[here] = torch.where(inside, picked, asked[here])
    return asked - total, best - asked


def _faults(
    each: _Tokens, differences: torch.Tensor, gaps: torch.Tensor, limits: AnswerLimits
) -> Iterator[Finding]:
    """Yield what is wrong with a sample's sampled tokens."""
    spread = each.spread
    bad = torch.nonzero(differences > limits.worst).flatten().tolist()
    if bad:
        first = bad[0]
        said = float(each.said.logprobs[first])
        yield Finding(
            check="answers",
            sample_id=each.name,
            detail=(
                f"{len(bad)} of {len(differences)} sampled tokens: token {int(each.tokens[first])},"
                f" sampled as number {first}: expected the log probability {said:.4f} of the server"
                f" that answered, found a difference of {float(differences[first]) * spread:.4f} in"
                f" the captured state (limit {limits.worst * spread:g})"
            ),
        )
    elif len(differences) >= _ENOUGH and (median := float(differences.median())) > limits.typical:
        detail = (
            f"expected half of {len(differences)} log probabilities within"
            f" {limits.typical * spread:.2g}, found a median difference of {median * spread:.2g}"
        )
        yield Finding(check="answers", sample_id=each.name, detail=detail)
    far = torch.nonzero(~(gaps <= limits.worst)).flatten().tolist()
    if each.said.temperature == 0 and far:
        yield Finding(
            check="answers",
            sample_id=each.name,
            detail=(
                f"temperature 0: expected the most likely token, found {int(each.tokens[far[0]])}"
                f" as number {far[0]}, whose logit is {float(gaps[far[0]]):.4f} smaller"
            ),
        )

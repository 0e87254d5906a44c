"""Second readings of the self-test's states: nothing is compared with itself.

| state | read by a tap, held against |
| --- | --- |
| r_0 | the embedding's rows on the disk, times the family's scale |
| r_k | SGLang's own capture, where the model has one |
| r_N | the final state: it must be the model's own norm of r_N, called once more |
| all | the same prompts, captured a second time |

Parity with the checkpoint judges where a second reading is missing.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from draftstates.errors import UserError
from draftstates.extract.client import Captured
from draftstates.model import family
from draftstates.model.folder import ModelFolder
from draftstates.plan.shard_tokens import ShardTokens
from draftstates.shards.layout import Shard
from draftstates.spec import CaptureSpec
from draftstates.verify.alignment import Rounding, unit_roundoff
from draftstates.verify.prefixes import Limits

# A sum over tensor parallel ranks and the addition of the residual, each done twice.
_ROUNDINGS = 8
# Of an embedding's row: its product with the family's scale, and the scale itself.
_EMBEDDING_ROUNDINGS = 3


def check(
    captured: Sequence[Captured], *, spec: CaptureSpec, text: Mapping[str, Any]
) -> dict[str, Any]:
    """Refuse a server whose taps read other states than a second reading gives.

    Args:
        captured: the self-test's answers.
        spec: the capture.
        text: the language model's part of `config.json`.

    Returns:
        `norm_distance`, of r_N by the final state; `own_capture_distance`, of the other r_k by
        SGLang's own capture, and why it is None where there is none.

    Raises:
        UserError: names the layer, the distance and its limit.
    """
    limit, last = _ROUNDINGS * Rounding.of(spec).largest, f"r_{spec.num_layers}"
    found: dict[str, list[float]] = {}
    for item in captured:
        if item.opinions is None:
            raise UserError(
                "the server did not hold its rows against a second reading: its plug-in is of"
                " another version"
            )
        for name, distance in {last: math.nan, **item.opinions}.items():
            found.setdefault(name, []).append(distance)
    # A NaN is larger than any limit.
    largest = {
        name: math.nan if any(map(math.isnan, each)) else max(each) for name, each in found.items()
    }
    norm = largest.pop(last)
    if not norm <= limit:
        raise UserError(
            f"{last}: the model's own norm of it differs by {norm:.3g} of a row's norm from the"
            f" final state (limit {limit:.3g}): the tap on the final norm reads another state"
        )
    other = family.OTHER_OWN_CAPTURE & {text.get("model_type")}
    for name, distance in largest.items():
        if not distance <= limit and not other:
            raise UserError(
                f"{name} as captured differs by {distance:.3g} of a row's norm from what SGLang's"
                f" own capture gives (limit {limit:.3g}): the server captures another layer, or one"
                " that is not yet summed over its ranks"
            )
    reason = captured[0].no_capture
    if other:
        reason = f"SGLang's own capture of {text.get('model_type')} is another state"
    return {
        "norm_distance": norm,
        "own_capture_distance": None if reason else max(largest.values(), default=None),
        "own_capture_missing": reason,
    }


def check_repeat(distance: float, *, spec: CaptureSpec) -> None:
    """Refuse a server that gives other states the second time.

    Args:
        distance: the largest distance of a row from the same row, captured a second time.

    Raises:
        UserError: names the distance and its limit.
    """
    limit = Limits.of(Rounding.of(spec)).worst
    if not distance <= limit:
        raise UserError(
            f"the same prompts, captured twice, differ by {distance:.3g} of a row's norm (limit"
            f" {limit:.3g}): the server's numbers depend on what it computed before"
        )


def check_embeddings(
    shard: Shard, tokens: ShardTokens, *, spec: CaptureSpec, model: ModelFolder
) -> dict[str, Any]:
    """Refuse r_0 that are not the embedding's rows on the disk, times the family's scale.

    Args:
        shard: the self-test's shard.
        tokens: its ids.
        spec: the capture.
        model: the target model.

    Returns:
        `embedding_distance`; None where r_0 is not captured or no multiple of the embedding.

    Raises:
        UserError: names the distance and its limit.
    """
    scale = family.embedding_scale(model.text)
    if 0 not in shard.header.residual_layers or scale is None:
        return {"embedding_distance": None}
    table = model.tensor(family.EMBEDDING_NAMES)
    if table is None or not table.is_floating_point():
        return {"embedding_distance": None}
    position = shard.header.residual_layers.index(0)
    rows = shard.state_rows("hidden_states", 0, shard.header.rows)[:, position].float()
    expected = table[torch.as_tensor(tokens.input_ids).long()].float() * scale
    found = ((rows - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
    coarsest = max(unit_roundoff(table.dtype), Rounding.of(spec).largest)
    limit = _EMBEDDING_ROUNDINGS * coarsest
    if not found <= limit:
        raise UserError(
            f"r_0 differs by {found:.3g} of a row's norm from the embedding on the disk, times"
            f" {scale:g} (limit {limit:.3g}): the server embeds other ids or with other weights"
        )
    return {"embedding_distance": found}

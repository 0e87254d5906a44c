"""Rows of the report's tables: what was skipped and lost, the checks, and origins."""

from collections.abc import Mapping
from typing import Any

from draftstates.plan.words import of_share
from draftstates.records import Plan
from draftstates.verify.alignment import Rounding
from draftstates.verify.prefixes import Limits

ALIGNMENT = "alignment"
PREFIX = "prefix recapture"
ANSWERS = "answers"
_CHECKS = {"alignment": ALIGNMENT, "prefix": PREFIX, "answers": ANSWERS}
_LOST = {
    "lost_turns": "turn of a kept row",
    "not_rendered": "content of a skipped row",
    "not_used": "column or key of a kept row",
}
_WORST = 5
_SETTINGS = 40
_FLAGS = {
    "dtype": "the dtype that the server computed in",
    "quantization": "the quantisation of the weights",
    "kv_cache_dtype": "the dtype of the attention's cache",
    "device": "what it computed on",
    "tp_size": "GPUs that shared each layer",
    "dp_size": "copies of the model in one server",
    "disable_radix_cache": "true: no request could reuse another one's keys and values",
    "chunked_prefill_size": "longer samples were computed in chunks of this many tokens",
    "attention_backend": "the implementation of attention",
}


def answers_of(sources: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each source that the target model answered, with a few answers."""
    rows = []
    for name, source in sources.items():
        if said := source.get("answers"):
            timed, seconds = said.get("timed_tokens"), said["seconds"]
            skipped = [f"{count:,} {reason}" for reason, count in said["skipped"].items()]
            rows.append(
                {
                    "source": name,
                    **said,
                    "skipped": ", ".join(skipped) or "none",
                    "ends": ", ".join(
                        f"{reason} {count:,} ({of_share(count / max(said['answers'], 1))})"
                        for reason, count in said["finish"].items()
                    ),
                    "rate": timed / seconds if timed and seconds else None,
                    "cached": said["cached_tokens"] / max(said["prompt_tokens"], 1),
                }
            )
    return rows


def skipped_of(sources: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each source and reason, with its count and examples."""
    return [
        {
            "source": name,
            "reason": reason.replace("_", " "),
            "count": count,
            "examples": source["examples"].get(reason, []),
        }
        for name, source in sources.items()
        for reason, count in sorted(source["skipped"].items(), key=lambda item: -item[1])
    ]


def lost_of(sources: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each kind of content that no sample holds."""
    return [
        {"source": name, "what": what, "name": lost, "count": count}
        for name, source in sources.items()
        for field, what in _LOST.items()
        for lost, count in source[field].items()
    ]


def margins_of(plan: Plan, trust: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for each shard and check the share of the limit that it came to."""
    limit = Limits.of(Rounding.of(plan.capture)).typical
    return [
        {"check": check, "shard": shard["shard_id"], "source": shard["source"], "share": share}
        for shard in trust["shards"]
        for check, share in (
            (ALIGNMENT, shard["alignment_share_of_limit"]),
            (PREFIX, shard["prefix_distance"] / limit),
            *([(ANSWERS, shard["answers_share_of_limit"])] if shard["answer_tokens"] else []),
        )
    ]


def worst_of(plan: Plan, trust: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the samples nearest to each limit; where verification kept no samples, the shards."""
    rows = [
        {
            "check": _CHECKS[each["check"]],
            "sample_id": each["sample_id"],
            "source": shard["source"],
            "share": each["share"],
        }
        for shard in trust["shards"]
        for each in shard["worst"]
    ]
    rows = rows or [{**row, "sample_id": None} for row in margins_of(plan, trust)]
    rows.sort(key=lambda row: -row["share"])
    return [
        row
        for check in _CHECKS.values()
        for row in [row for row in rows if row["check"] == check and row["share"]][:_WORST]
    ]


def named_samples(plan: Plan, trust: Mapping[str, Any]) -> dict[str, tuple[str, bool]]:
    """Return why a check names a sample, and whether it refuses it, by sample id."""
    named = {
        row["sample_id"]: (f"{row['check']}: {of_share(row['share'])} of its limit", False)
        for row in worst_of(plan, trust)
        if row["sample_id"]
    }
    refused = {
        row["sample_id"]: (f"refused by {row['check']}: {row['detail']}", True)
        for row in trust["refused"]
        if row["sample_id"]
    }
    return named | refused


def checks_of(plan: Plan, trust: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return what each check has looked at, with what it means."""
    shards = trust["shards"]
    samples, tokens = (sum(shard[name] for shard in shards) for name in ("samples", "tokens"))
    again = sum(shard["recaptures"] for shard in shards)
    rows = sum(shard["recaptured_tokens"] for shard in shards)
    states = len(plan.capture.residual_layers) + plan.capture.final_state
    of = {entry.shard_id: entry.shared_tokens for entry in plan.shards}
    shared = sum(of[shard["shard_id"]] for shard in shards)
    found = [
        (
            "Counts",
            f"{tokens:,} tokens of {samples:,} samples",
            "rows written + rows shared = tokens sent; cached tokens are shared rows alone"
            if shared
            else "tokens sent = rows computed = length in the shard; nothing came from a cache",
        ),
        (
            "Values",
            f"{(tokens - shared) * states:,} rows",
            "every row is finite, not zero, not constant, and has the checksum of its capture",
        ),
        (
            "Alignment",
            f"{samples:,} samples",
            "the head, applied to the last state, gives the next tokens that the server returned"
            + ("" if plan.capture.final_state else "; the receipts hold that state alone"),
        ),
        (
            "Prefix recaptures",
            f"{again:,} samples, {rows:,} rows",
            "captured a second time as a prefix in another batch, with the same rows",
        ),
    ]
    if answers := sum(shard["answer_tokens"] for shard in shards):
        found.append(
            (
                "Answers",
                f"{answers:,} sampled tokens",
                "the captured state before each gives the log probability that the server which"
                " sampled it reported",
            )
        )
    parity = trust["parity"]
    found.append(
        (
            "Parity",
            str(parity.get("result", "not compared")),
            "the self-test's rows agree with a plain Hugging Face forward pass of the checkpoint",
        )
    )
    said = trust["attestation"].get("self_test", {})
    if said:
        found.append(
            (
                "Self-test",
                f"{said.get('samples')} samples twice, in {said.get('seconds')} s",
                "the server's own captures passed all these checks before its address was used",
            )
        )
        distances = (
            ("Entry hooks", "hook_distance", "rows as captured against what the next layer read"),
            ("Repetition", "repeat_distance", "rows of the first pass against the second"),
        )
        found += [
            (name, f"{said[field]:.3g}", f"{meaning}: largest distance over the row's norm")
            for name, field, meaning in distances
            if isinstance(said.get(field), float | int)
        ]
    return [{"name": name, "value": value, "meaning": meaning} for name, value, meaning in found]


def origins_of(plan: Plan, trust: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return model, key, engine, flags and images, with what each means."""
    spec, attestation = plan.capture, trust["attestation"]
    engine = attestation.get("engine", {})
    found = [
        ("Target model", f"{spec.model} ({spec.model_digest})", "a hash of the model's content"),
        ("Capture key", spec.key, "a hash of everything that decides the numbers"),
        (
            "Numbers",
            f"computed in {spec.compute_dtype}, stored in {spec.stored_dtype}, quantisation"
            f" {spec.quantization or 'none'}",
            "part of the capture key",
        ),
    ]
    given = [*spec.engine_args, *spec.engine_env]
    if given:
        found.append(("Engine arguments", " ".join(given), "they change numbers: part of the key"))
    if engine:
        version = f"{engine.get('name')} {engine.get('version')}"
        found.append(("Engine", version, "what computed the states"))
    for flag, value in attestation.get("flags", {}).items():
        if value is not None:
            found.append((flag, str(value), _FLAGS.get(flag, "an argument of the server")))
    for group, settings in attestation.get("settings", {}).items():
        shown = [f"{name} {value}" for name, value in sorted(settings.items())]
        more = [f"and {len(shown) - _SETTINGS} more in server.json"] * (len(shown) > _SETTINGS)
        found.append(
            (
                f"Settings: {group}",
                ", ".join([*shown[:_SETTINGS], *more]),
                "numeric settings that the server computed with",
            )
        )
    found += _images(trust["manifest"].get("images", {}))
    return [{"name": name, "value": value, "meaning": meaning} for name, value, meaning in found]


def _images(images: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the image of each step, in one row for the steps that have the same one."""
    steps: dict[str, list[str]] = {}
    for step, names in images.items():
        steps.setdefault(", ".join(name or "none" for name in names), []).append(step)
    return [
        (
            "Container images" if len(steps) == 1 else f"Image of {', '.join(of)}",
            name,
            "of the steps; none: they ran on the host",
        )
        for name, of in steps.items()
    ]

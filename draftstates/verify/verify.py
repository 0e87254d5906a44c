"""Verification of one shard: its file is read again and held to the plan, to its receipts and to the model's head."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash

from draftstates import ids, wire
from draftstates.alignment import Rounding, check_alignment
from draftstates.checks import Finding, Scan, check_checksum, check_header, check_layout, check_receipt, scan_sample
from draftstates.containers import present_image
from draftstates.errors import CAPTURE_ANEW, ShardRefused, UserError
from draftstates.model import Head, read_head
from draftstates.prefixes import Limits, check_prefix
from draftstates.probes import choose_probes
from draftstates.shards import Shard
from draftstates.verified import FORMAT, FORMAT_VERSION, sealed

_SHOWN = 20
_READ_BYTES = 1 << 22


def verify_shard(
    shard_id: str, *, plan: Mapping[str, Any], model: Path, shard: Path, probe: Path, receipts: Path, threads: int
) -> dict[str, Any]:
    """Check everything that is promised of a shard.

    Args:
        plan: the content of `plan.json`.
        model: folder of the model, for its head.
        shard, probe, receipts: what extraction left; threads: cores to use.

    Returns:
        the content of `verified/<shard id>.json`: the file's checksum, each sample's, and figures.

    Raises:
        ShardRefused: names each sample at fault, the check that it failed, and what to do.
    """
    entry = _planned(plan, shard_id)
    file, again, said = _open(shard), _open(probe), _read_receipts(receipts)
    torch.set_num_threads(threads)
    with ThreadPoolExecutor(threads) as pool:
        checksum: Future[str] = pool.submit(file_checksum, shard)
        _refuse(_check_structure(file, again, said, plan=plan, entry=entry), shard)
        scans = list(pool.map(lambda index: scan_sample(file, index), range(len(file))))
        probe_scans = list(pool.map(lambda index: scan_sample(again, index), range(len(again))))
    findings = _check_samples(file, said["samples"], scans, prefix=False)
    findings += _check_samples(again, said["probes"], probe_scans, prefix=True)
    rounding = Rounding.of(plan["capture"])
    head = read_head(model, final_norm=plan["capture"]["final_norm"])
    misaligned, share = _check_alignment(file, said["samples"], head=head, rounding=rounding)
    moved, typical = _check_prefixes(file, again, said["probes"], limits=Limits.of(rounding))
    _refuse(findings + misaligned + moved, shard, receipts=said["samples"])
    return sealed(
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "shard_id": shard_id,
            "capture_key": plan["capture"]["key"],
            "engine": said["engine"],
            "images": {**said.get("images", {}), "verify": [present_image()]},
            "bytes": file.header.size,
            "checksum": checksum.result(),
            "samples": [_verified(file, index, scan) for index, scan in enumerate(scans)],
            "figures": {
                "samples": len(file),
                "tokens": file.header.rows,
                "probes": len(again),
                "probe_tokens": again.header.rows,
                "alignment_share_of_limit": round(share, 4),
                "prefix_distance": round(typical, 6),
            },
        }
    )


def file_checksum(path: Path) -> str:
    """XXH3-128 of a whole file, 32 hex digits, as `xxhsum -H2` gives it."""
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def _planned(plan: Mapping[str, Any], shard_id: str) -> Mapping[str, Any]:
    for entry in plan["shards"]:
        if entry["shard_id"] == shard_id:
            return entry
    raise UserError(f"shard {shard_id} is not in the plan")


def _open(path: Path) -> Shard:
    try:
        return Shard(path)
    except (OSError, UserError) as error:
        what = f"{path}: cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise UserError(f"{what}; {CAPTURE_ANEW}") from error


def _read_receipts(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_bytes())
        found = (said["format"], said["format_version"])
        said["engine"], said["shard_id"], said["capture_key"]  # noqa: B018 (all must be there)
        for receipt in (*said["samples"], *said["probes"]):
            receipt["sample_id"]  # noqa: B018
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: expected a shard's receipts: {type(error).__name__}: {error}; {CAPTURE_ANEW}") from error
    if found != (wire.RECEIPTS_FORMAT, wire.RECEIPTS_VERSION):
        expected = f"{wire.RECEIPTS_FORMAT} version {wire.RECEIPTS_VERSION}"
        raise UserError(f"{path}: expected {expected}, found {found[0]} {found[1]}; {CAPTURE_ANEW}")
    return said


def _check_structure(
    file: Shard, again: Shard, said: Mapping[str, Any], *, plan: Mapping[str, Any], entry: Mapping[str, Any]
) -> list[Finding]:
    """What the other checks stand on: headers, layout, the number of receipts, the choice of probes."""
    capture, shard_id = plan["capture"], entry["shard_id"]
    findings = list(check_header(file.header, capture=capture, shard_id=shard_id))
    findings += check_header(again.header, capture=capture, shard_id=shard_id)
    findings += check_layout(file, samples=entry["samples"], tokens=entry["tokens"])
    findings += check_layout(again, samples=len(said["probes"]), tokens=again.header.rows)
    for what, expected, found in (
        ("shard_id", shard_id, said["shard_id"]),
        ("shard_id of its samples", shard_id, ids.shard_id(file.header.sample_ids)),
        ("capture_key", capture["key"], said["capture_key"]),
        ("receipts", entry["samples"], len(said["samples"])),
    ):
        if expected != found:
            findings.append(Finding(check="counts", sample_id=None, detail=f"expected {what} {expected}, found {found}"))
    return findings or list(_check_probe_choice(file, again, said, checks=plan["checks"]))


def _check_probe_choice(file: Shard, again: Shard, said: Mapping[str, Any], *, checks: Mapping[str, Any]) -> Iterator[Finding]:
    """The samples that were captured again must be those that the key chooses, and no fewer than the plan asks for."""
    probes = said["probes"]
    copied = [index for index, receipt in enumerate(said["samples"]) if receipt.get("copied_from")]
    names, offsets = file.header.sample_ids, file.offsets.tolist()
    lengths = [end - first for first, end in zip(offsets, offsets[1:], strict=False)]
    shard_id = file.header.metadata["shard_id"]
    key = {"shard_id": shard_id, "copied": copied}
    asked = choose_probes(names, lengths, fraction=checks["probe_fraction"], minimum=checks["probe_minimum"], **key)
    if len(probes) < len(asked):
        detail = f"{len(probes)} samples were captured again, the plan asks for {len(asked)} (checks.probe_fraction, probe_minimum)"
        yield Finding(check="prefix", sample_id=None, detail=detail)
    chosen = choose_probes(names, lengths, fraction=0, minimum=len(probes), **key)
    for number, (position, rows) in enumerate(chosen):
        first, end = again.rows(number)
        start = offsets[position]
        if (probes[number].get("position"), end - first) != (position, rows) or again.header.sample_ids[number] != names[position]:
            detail = f"expected {rows} rows of it as probe {number}, found {end - first} of {again.header.sample_ids[number]}"
            yield Finding(check="prefix", sample_id=names[position], detail=detail)
        elif (again.input_ids[first:end] != file.input_ids[start : start + rows]).any():
            yield Finding(
                check="prefix", sample_id=names[position], detail=f"probe {number} holds other ids than the sample's first {rows}"
            )


def _check_samples(file: Shard, receipts: Sequence[Mapping[str, Any]], scans: Sequence[Scan], *, prefix: bool) -> list[Finding]:
    findings: list[Finding] = []
    for index, (receipt, scan) in enumerate(zip(receipts, scans, strict=True)):
        findings += check_receipt(file, index, receipt, prefix=prefix)
        findings += scan.findings
        findings += check_checksum(file.header.sample_ids[index], found=scan.checksum, receipt=receipt)
    return findings


def _check_alignment(file: Shard, receipts: Sequence[Mapping[str, Any]], *, head: Head, rounding: Rounding) -> tuple[list[Finding], float]:
    names, findings, usable = file.header.sample_ids, [], []
    for index, receipt in enumerate(receipts):
        if _is_top(receipt.get("top"), vocabulary=len(head.weight)):
            usable.append(index)
        else:
            detail = f"expected {wire.TOP_TOKENS} pairs of token and log probability, the receipt has {receipt.get('top')}"
            findings.append(Finding(check="alignment", sample_id=names[index], detail=detail))
    if not usable:
        return findings, 0.0
    last = torch.cat([file.states("final_hidden_state", end - 1, end) for end in (file.rows(index)[1] for index in usable)])
    found, share = check_alignment(
        [names[index] for index in usable], last, [receipts[index]["top"] for index in usable], head=head, rounding=rounding
    )
    return findings + found, share


def _is_top(top: Any, *, vocabulary: int) -> bool:
    try:
        return len(top) == wire.TOP_TOKENS and all(0 <= int(token) < vocabulary and math.isfinite(value) for token, value in top)
    except (TypeError, ValueError):
        return False


def _check_prefixes(file: Shard, again: Shard, probes: Sequence[Mapping[str, Any]], *, limits: Limits) -> tuple[list[Finding], float]:
    findings, largest = [], 0.0
    for number, probe in enumerate(probes):
        found, typical = check_prefix(file, probe["position"], again, number, limits=limits)
        findings += found
        largest = max(largest, typical)
    return findings, largest


def _verified(file: Shard, index: int, scan: Scan) -> dict[str, Any]:
    first, end = file.rows(index)
    supervised = int(file.loss_mask[first:end].sum(dtype="int64"))
    return {"sample_id": file.header.sample_ids[index], "rows": end - first, "supervised": supervised, "checksum": scan.checksum}


def _refuse(findings: Sequence[Finding], shard: Path, *, receipts: Sequence[Mapping[str, Any]] = ()) -> None:
    if not findings:
        return
    faulty = {finding.sample_id for finding in findings}
    origins = frozenset(receipt["copied_from"] for receipt in receipts if receipt["sample_id"] in faulty and receipt.get("copied_from"))
    lines = [f"  {finding}" for finding in findings[:_SHOWN]]
    if len(findings) > _SHOWN:
        lines.append(f"  … and {len(findings) - _SHOWN} more")
    samples = len({finding.sample_id for finding in findings if finding.sample_id is not None})
    advice = f"Delete {shard} and run again to capture it anew."
    if samples:
        advice += " To go on without a sample that fails again, add its id to `exclude` in the configuration."
    if origins:
        advice += (
            f" Samples at fault were copied from {', '.join(sorted(origins))}: nothing is copied from there any more, and what a manifest"
            " of before says of them is in doubt too."
        )
    raise ShardRefused("\n".join([f"{shard}: {len(findings)} faults in {samples} samples:", *lines, advice]), origins=origins)

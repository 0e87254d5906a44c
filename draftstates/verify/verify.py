"""Verification of one shard: its file is read from the disk and checked.

It is compared with the plan, with its receipts and with the target model's head.
"""

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftstates.containers import present_image
from draftstates.errors import ShardRefused, UserError, capture_again, counted
from draftstates.extract import protocol
from draftstates.files import differences, file_checksum
from draftstates.model.family import has_known_norm
from draftstates.model.final_norm import FinalNorm
from draftstates.model.folder import ModelFolder
from draftstates.model.head import Head, read_head
from draftstates.plan.prefixes import shard_id
from draftstates.plan.recaptures import choose_compared, choose_recaptures
from draftstates.plan.shard_tokens import SampledTokens, read_sampled
from draftstates.records import (
    Figures,
    NearLimit,
    PlannedChecks,
    PlannedShard,
    SampleReceipt,
    ShardReceipts,
    Verified,
    VerifiedSamples,
)
from draftstates.shards.layout import Shard
from draftstates.spec import CaptureSpec, torch_dtype
from draftstates.verify.alignment import Rounding, check_alignment, check_final, check_rows
from draftstates.verify.answers import AnswerLimits, check_answers
from draftstates.verify.checks import (
    Finding,
    Scan,
    check_header,
    check_layout,
    check_sample,
    scan_sample,
)
from draftstates.verify.prefixes import Limits, check_prefix
from draftstates.verify.sizes import layer_sizes, sample_sizes

_SHOWN = 20
# samples nearest to each limit that are named
_NEAREST = 3


def verify_shard(
    planned: PlannedShard,
    *,
    spec: CaptureSpec,
    checks: PlannedChecks,
    model: Path,
    shard: Path,
    recaptures: Path,
    receipts: Path,
    threads: int,
    tokens: Path | None = None,
) -> Verified:
    """Check every promise of a shard.

    Args:
        planned: the shard's entry in the plan.
        spec: the plan's capture.
        checks: the plan's checks.
        model: folder of the target model, for its head.
        shard: the shard's file.
        recaptures: file of its prefix recaptures.
        receipts: file of its receipts.
        threads: cores to use.
        tokens: file of the shard's tokens, with what the server that answered said of them; needed
            where the plan says that the target model answered.

    Raises:
        ShardRefused: names each sample at fault, the check that it failed, and what to do.
        UserError: the tokens are needed, and missing or damaged.
    """
    sampled = _sampled(planned, tokens)
    file, again, received = _open(shard), _open(recaptures), _read_receipts(receipts)
    torch.set_num_threads(threads)
    with ThreadPoolExecutor(threads) as pool:
        checksum: Future[str] = pool.submit(file_checksum, shard)
        findings = _check_structure(
            file, again, received, planned=planned, spec=spec, checks=checks
        )
        _refuse(findings, shard)
        scans = list(pool.map(lambda index: scan_sample(file, index), range(len(file))))
        recapture_scans = list(pool.map(lambda index: scan_sample(again, index), range(len(again))))
        sizes = list(pool.map(lambda index: sample_sizes(file, index), range(len(file))))
        finals = _check_finals(file, again, spec=spec, model=ModelFolder(model), pool=pool)
        checksums = list(
            pool.map(
                lambda index: (
                    file.checksum(index) if file.segments.shared(index) else scans[index].checksum
                ),
                range(len(file)),
            )
        )
    findings = _check_samples(file, received.samples, scans, prefix=False)
    findings += _check_samples(again, received.recaptures, recapture_scans, prefix=True)
    rounding = Rounding.of(spec)
    head = read_head(ModelFolder(model), final_norm=spec.final_norm)
    misaligned, shares = _check_alignment(file, received.samples, head=head, rounding=rounding)
    misaligned += _check_rows(again, received.recaptures, shares, head=head, rounding=rounding)
    for found, name, share in finals:
        misaligned += found
        shares[name] = max(share, shares.get(name, 0.0))
    limits = Limits.of(rounding)
    moved, distances = _check_prefixes(file, again, received.recaptures, limits=limits)
    untrue, answer_shares, answer_tokens = (
        check_answers(
            file,
            sampled,
            head=head,
            rounding=rounding,
            limits=AnswerLimits.of(rounding, checks.answers),
        )
        if planned.answered
        else ([], {}, 0)
    )
    moved += _check_again(file, received.samples, checks=checks, limits=limits)
    _refuse(findings + misaligned + moved + untrue, shard, receipts=received.samples)
    return Verified(
        shard_id=planned.shard_id,
        capture_key=spec.key,
        engine=received.engine,
        images={**received.images, "verify": (present_image(),)},
        bytes=file.header.size,
        checksum=checksum.result(),
        samples=_verified_samples(file, checksums),
        figures=Figures(
            recaptures=len(again),
            recaptured_tokens=again.header.rows,
            alignment_share_of_limit=round(max(shares.values(), default=0.0), 4),
            prefix_distance=round(max(distances.values(), default=0.0), 6),
            answer_tokens=answer_tokens,
            answers_share_of_limit=round(max(answer_shares.values(), default=0.0), 4),
        ),
        selftests=received.selftests,
        worst=(
            *_nearest("alignment", shares),
            *_nearest(
                "prefix", {name: found / limits.typical for name, found in distances.items()}
            ),
            *_nearest("answers", answer_shares),
        ),
        sizes=layer_sizes(sizes, layers=spec.residual_layers, final=spec.final_state),
        answers_limit=checks.answers if planned.answered else None,
    )


def _sampled(planned: PlannedShard, tokens: Path | None) -> dict[str, SampledTokens]:
    """Return what the server that answered said of the shard's samples; nothing if none did."""
    if not planned.answered:
        return {}
    if tokens is None:
        raise UserError(f"shard {planned.shard_id}: expected its tokens, to check the answers")
    return read_sampled(tokens, shard_id=planned.shard_id)


def _open(path: Path) -> Shard:
    """Open a shard's file, or refuse the shard."""
    try:
        return Shard(path)
    except OSError as error:
        raise ShardRefused(
            f"{path}: cannot be read: {error.strerror}; {capture_again(path)}"
        ) from error
    except UserError as error:
        raise ShardRefused(f"{error}; {capture_again(path)}") from error


def _read_receipts(path: Path) -> ShardReceipts:
    try:
        return ShardReceipts.read(path)
    except UserError as error:
        raise ShardRefused(str(error)) from error


def _check_structure(
    file: Shard,
    again: Shard,
    received: ShardReceipts,
    *,
    planned: PlannedShard,
    spec: CaptureSpec,
    checks: PlannedChecks,
) -> list[Finding]:
    """Check what the other checks need: headers, layout, number of receipts, recaptured samples."""
    findings = list(check_header(file.header, spec=spec, shard_id=planned.shard_id))
    findings += check_header(again.header, spec=spec, shard_id=planned.shard_id)
    findings += check_layout(file, samples=planned.samples, tokens=planned.tokens)
    findings += check_layout(again, samples=len(received.recaptures), tokens=again.header.rows)
    expected = {
        "shard_id": planned.shard_id,
        "shard_id of its samples": planned.shard_id,
        "capture_key": spec.key,
        "receipts": planned.samples,
    }
    found = {
        "shard_id": received.shard_id,
        "shard_id of its samples": shard_id(file.header.sample_ids, file.segments),
        "capture_key": received.capture_key,
        "receipts": len(received.samples),
    }
    findings += [
        Finding(check="counts", sample_id=None, detail=str(difference))
        for difference in differences(expected, found)
    ]
    return findings or list(_check_recapture_choice(file, again, received, checks=checks))


def _check_recapture_choice(
    file: Shard, again: Shard, received: ShardReceipts, *, checks: PlannedChecks
) -> Iterator[Finding]:
    """Check that the prefix recaptures are those that the key chooses.

    They must be at least as many as the plan asks for.
    """
    recaptures = received.recaptures
    copied = [index for index, receipt in enumerate(received.samples) if receipt.copied_from]
    names, offsets = file.header.sample_ids, file.offsets.tolist()
    lengths = [end - first for first, end in zip(offsets, offsets[1:], strict=False)]
    shard_id = file.header.metadata["shard_id"]
    key = {"shard_id": shard_id, "copied": copied, "segments": file.segments}
    asked = choose_recaptures(
        names,
        lengths,
        fraction=checks.recapture_fraction,
        minimum=checks.recapture_minimum,
        **key,
    )
    if len(recaptures) < len(asked):
        detail = (
            f"{len(recaptures)} samples were captured again, the plan asks for {len(asked)}"
            " (checks.recapture_fraction, recapture_minimum)"
        )
        yield Finding(check="prefix", sample_id=None, detail=detail)
    chosen = choose_recaptures(names, lengths, fraction=0, minimum=len(recaptures), **key)
    for number, (position, rows) in enumerate(chosen):
        first, end = again.rows(number)
        start = offsets[position]
        if (recaptures[number].position, end - first) != (
            position,
            rows,
        ) or again.header.sample_ids[number] != names[position]:
            detail = (
                f"expected {rows} rows of it as prefix recapture {number}, found {end - first} of"
                f" {again.header.sample_ids[number]}"
            )
            yield Finding(check="prefix", sample_id=names[position], detail=detail)
        elif (again.input_ids[first:end] != file.input_ids[start : start + rows]).any():
            yield Finding(
                check="prefix",
                sample_id=names[position],
                detail=f"prefix recapture {number} holds other ids than the sample's first {rows}",
            )


def _check_samples(
    file: Shard, receipts: Sequence[SampleReceipt], scans: Sequence[Scan], *, prefix: bool
) -> list[Finding]:
    """Check each sample's receipt, values and checksum."""
    findings: list[Finding] = []
    for index, (receipt, scan) in enumerate(zip(receipts, scans, strict=True)):
        most = 0 if prefix else _most_cached(file, index, receipts)
        findings += check_sample(
            file, index, receipt=receipt, scan=scan, prefix=prefix, most_cached=most
        )
    return findings


def _most_cached(file: Shard, index: int, receipts: Sequence[SampleReceipt]) -> int:
    """Return how many of a sample's first tokens may have come from the radix cache.

    Those are the shared rows, if each of them was written for an earlier sample of this shard whose
    request had the same namespace: no other shard and no other attempt uses it.
    """
    names = {receipts[owner].namespace for owner in file.segments.owners(index)}
    same = names == {receipts[index].namespace} and None not in names
    return file.segments.shared(index) if same else 0


def _check_alignment(
    file: Shard, receipts: Sequence[SampleReceipt], *, head: Head, rounding: Rounding
) -> tuple[list[Finding], dict[str, float]]:
    """Check the last states; return each sample's disagreement as a share of its limit too."""
    names, findings = file.header.sample_ids, []
    usable: dict[int, torch.Tensor] = {}
    for index, receipt in enumerate(receipts):
        last = _last_state(file, index, receipt, width=head.weight.shape[1])
        if not _are_pairs(receipt.top, protocol.TOP_TOKENS, vocabulary=len(head.weight)):
            detail = (
                f"expected {protocol.TOP_TOKENS} pairs of token and log probability, the receipt"
                f" has {receipt.top}"
            )
            findings.append(Finding(check="alignment", sample_id=names[index], detail=detail))
        elif last is None:
            findings.append(_no_last_state(file, names[index], receipt, width=head.weight.shape[1]))
        else:
            usable[index] = last
    if not usable:
        return findings, {}
    found, shares = check_alignment(
        [names[index] for index in usable],
        torch.cat(list(usable.values())),
        [receipts[index].top for index in usable],
        head=head,
        rounding=rounding,
    )
    return findings + found, shares


def _check_finals(
    file: Shard, again: Shard, *, spec: CaptureSpec, model: ModelFolder, pool: ThreadPoolExecutor
) -> list[tuple[list[Finding], str, float]]:
    """Compare every final state with r_N, where both are captured and the norm is known.

    Returns:
        findings, sample id and disagreement of each sample and of each prefix recapture.
    """
    if spec.num_layers not in spec.residual_layers or not spec.final_state:
        return []
    layer, norm = spec.residual_layers.index(spec.num_layers), None
    if spec.final_norm == "post_norm":
        if not has_known_norm(model.text):
            return []
        norm = FinalNorm.from_model(model)
    asked = [(shard, index) for shard in (file, again) for index in range(len(shard))]
    rounding = Rounding.of(spec)
    found = pool.map(
        lambda each: check_final(*each, layer=layer, norm=norm, rounding=rounding), asked
    )
    return [
        (findings, shard.header.sample_ids[index], share)
        for (shard, index), (findings, share) in zip(asked, found, strict=True)
    ]


def _check_rows(
    again: Shard,
    recaptures: Sequence[SampleReceipt],
    shares: dict[str, float],
    *,
    head: Head,
    rounding: Rounding,
) -> list[Finding]:
    """Check every final state of the prefix recaptures; raise each sample's disagreement.

    Where the shard holds no final states, that of the last row is checked, which the receipt holds.
    """
    findings, count = [], protocol.ROW_TOKENS + 1
    for number, receipt in enumerate(recaptures):
        name, (first, end) = again.header.sample_ids[number], again.rows(number)
        nexts, following = receipt.next_tokens or [], again.input_ids[first + 1 : end].tolist()
        whole = len(nexts) == end - first and all(
            _are_pairs(pairs, count, vocabulary=len(head.weight)) for pairs in nexts
        )
        if not whole or [pairs[-1][0] for pairs in nexts[:-1]] != following:
            detail = (
                f"expected the next tokens of {end - first} rows of its prefix recapture, and"
                f" those that follow, the receipt has others, of {len(nexts)} rows"
            )
            findings.append(Finding(check="alignment", sample_id=name, detail=detail))
            continue
        if "final_hidden_state" in again.header.states():
            states = again.state_rows("final_hidden_state", first, end)
        elif (states := _last_state(again, number, receipt, width=head.weight.shape[1])) is None:
            findings.append(_no_last_state(again, name, receipt, width=head.weight.shape[1]))
            continue
        found, share = check_rows(name, states, nexts[-len(states) :], head=head, rounding=rounding)
        findings += found
        shares[name] = max(share, shares.get(name, 0.0))
    return findings


def _no_last_state(file: Shard, name: str, receipt: SampleReceipt, *, width: int) -> Finding:
    detail = (
        f"expected the last token's final state, {width} numbers in {file.stored_dtype}, the"
        f" receipt has {str(receipt.last_state)[:40]!r}"
    )
    return Finding(check="alignment", sample_id=name, detail=detail)


def _last_state(
    file: Shard, index: int, receipt: SampleReceipt, *, width: int
) -> torch.Tensor | None:
    """Return the final state of a sample's last token, [1, H].

    Where the shard holds no final states, the receipt does; None where it does not.
    """
    if "final_hidden_state" in file.header.states():
        end = file.rows(index)[1]
        return file.state_rows("final_hidden_state", end - 1, end)
    dtype = torch_dtype(file.stored_dtype)
    try:
        data = base64.b64decode(receipt.last_state, validate=True)
    except (TypeError, ValueError):
        return None
    if len(data) != width * dtype.itemsize:
        return None
    return torch.frombuffer(bytearray(data), dtype=dtype)[None]


def _are_pairs(pairs: Any, count: int, *, vocabulary: int) -> bool:
    """Return whether a receipt's next tokens can be compared."""
    try:
        return len(pairs) == count and all(
            isinstance(token, int) and 0 <= token < vocabulary and math.isfinite(value)
            for token, value in pairs
        )
    except (TypeError, ValueError):
        return False


def _check_prefixes(
    file: Shard, again: Shard, recaptures: Sequence[SampleReceipt], *, limits: Limits
) -> tuple[list[Finding], dict[str, float]]:
    """Compare all prefix recaptures; return the median distance of each sample too."""
    findings, distances = [], {}
    for number, recapture in enumerate(recaptures):
        found, typical = check_prefix(file, recapture.position, again, number, limits=limits)
        findings += found
        distances[again.header.sample_ids[number]] = typical
    return findings, distances


def _check_again(
    file: Shard, receipts: Sequence[SampleReceipt], *, checks: PlannedChecks, limits: Limits
) -> Iterator[Finding]:
    """Check shared rows that the server computed again and compared with the stored ones.

    It compares those of the samples that the key chooses. And where a cache was to have a sample's
    shared rows, those that did not come from it.
    """
    compared = choose_compared(
        file.header.sample_ids,
        file.segments,
        shard_id=file.header.metadata["shard_id"],
        fraction=checks.recapture_fraction,
        copied=[index for index, receipt in enumerate(receipts) if receipt.copied_from],
    )
    for index, receipt in enumerate(receipts):
        name, again = receipt.sample_id, receipt.again_rows
        most = _most_cached(file, index, receipts)
        if most or index in compared:
            expected = file.segments.shared(index) - min(receipt.cached_tokens, most)
            if again != expected:
                detail = (
                    f"again_rows: expected {expected} shared rows that were computed again, and so"
                    f" compared with the shard's, the receipt has {again}"
                )
                yield Finding(check="prefix", sample_id=name, detail=detail)
        if not receipt.again_distance <= limits.worst:
            detail = (
                f"a row of {again} that were computed again differs from the shard's by"
                f" {receipt.again_distance:.3g} (limit {limits.worst:.3g})"
            )
            yield Finding(check="prefix", sample_id=name, detail=detail)


def _nearest(check: str, shares: Mapping[str, float]) -> list[NearLimit]:
    """Return the samples that came nearest to the limit of a check, the nearest first."""
    names = sorted(shares, key=lambda name: -shares[name])[:_NEAREST]
    return [NearLimit(check=check, sample_id=name, share=round(shares[name], 4)) for name in names]


def _verified_samples(file: Shard, checksums: Sequence[str]) -> VerifiedSamples:
    supervised = np.add.reduceat(file.loss_mask, file.offsets[:-1], dtype=np.int64)
    return VerifiedSamples(
        sample_id=tuple(file.header.sample_ids),
        tokens=tuple(np.diff(file.offsets).tolist()),
        supervised_tokens=tuple(supervised.tolist()),
        checksum=tuple(checksums),
    )


def _refuse(
    findings: Sequence[Finding], shard: Path, *, receipts: Sequence[SampleReceipt] = ()
) -> None:
    """Refuse the shard if a check found something; say what, and what to do."""
    if not findings:
        return
    faulty = {finding.sample_id for finding in findings}
    origins = frozenset(
        receipt.copied_from
        for receipt in receipts
        if receipt.sample_id in faulty and receipt.copied_from
    )
    lines = [f"  {finding}" for finding in findings[:_SHOWN]]
    if len(findings) > _SHOWN:
        lines.append(f"  … and {len(findings) - _SHOWN} more")
    samples = len({finding.sample_id for finding in findings if finding.sample_id is not None})
    advice = f"T{capture_again(shard)[1:]}"
    if samples:
        advice += (
            "\nTo go on without a sample that fails every time, add its id to `exclude` in the"
            " configuration."
        )
    if origins:
        advice += (
            f"\nSamples at fault were copied from {', '.join(sorted(origins))}: nothing is copied"
            " from there any more. Earlier manifests that list this shard are in doubt too."
        )
    where = f"in {counted(samples, 'sample')}" if samples else "in the shard"
    title = f"{shard}: {counted(len(findings), 'fault')} {where}:"
    raise ShardRefused("\n".join([title, *lines, advice]), origins=origins)

"""Extraction: one shard's samples go through the server into one file, with their receipts."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from draftstates.config import Checks, Extract
from draftstates.containers import distinct, present_image
from draftstates.errors import UserError, counted, result_is_complete
from draftstates.extract import protocol
from draftstates.extract.client import Captured, Client, Endpoint, WaitedInVain, Work
from draftstates.extract.progress import ProgressFile
from draftstates.extract.reuse import Copied, copy_captured
from draftstates.extract.staging import building_folder
from draftstates.files import publish
from draftstates.paths import Capture, recaptures_of, receipts_of
from draftstates.plan.prefixes import Segments
from draftstates.plan.recaptures import choose_compared, choose_recaptures
from draftstates.plan.shard_tokens import ShardTokens
from draftstates.records import Engine, Images, SampleReceipt, ShardReceipts, withdraw_manifest
from draftstates.shards import layout
from draftstates.spec import CaptureSpec


class ExtractOptions(Extract, Checks):
    """Settings of an extraction: keys of the configuration, and the attempts at a sample.

    Attributes:
        retries: further attempts at a sample that failed, alone.
    """

    retries: int = 2


def extract_shard(
    tokens: ShardTokens,
    *,
    spec: CaptureSpec,
    endpoint: Endpoint,
    engine: str,
    options: ExtractOptions,
    output: Path,
    planned: Collection[str],
    server_image: str | None = None,
    selftest: str | None = None,
) -> dict[str, float]:
    """Make one shard.

    The shard gets its final name when it is complete and synced, and every sample has its receipt.
    Samples of verified shards outside the plan are copied, the others captured (see `reuse`).

    Args:
        output: `<capture>/shards/<shard id>.safetensors`; beside it appear `<shard
            id>.recaptures.safetensors` and `<shard id>.receipts.json`.
        planned: ids of all planned shards.
        server_image: file name of the image that the server runs in, for the record.
        selftest: id of the self-test rows that the server agreed with; the manifest asks for it.

    Returns:
        figures: captured, copied, recaptured and cached tokens, shared tokens that were computed
        again and compared, and seconds.

    Raises:
        UserError: names each sample that could not be captured, and why.
    """
    capture_folder = Capture.of_shard(output)
    with building_folder(capture_folder.building, tokens.shard_id) as folder:
        shard, recaptures = folder / "shard.safetensors", folder / "recaptures.safetensors"
        layout.create(shard, spec=spec, **vars(tokens))
        start = time.monotonic()
        copied = (
            copy_captured(shard, capture_folder=capture_folder.folder, planned=planned)
            if options.reuse
            else Copied()
        )
        work, chosen = make_work(
            tokens,
            spec=spec,
            options=options,
            shard=shard,
            recaptures=recaptures,
            copied=copied.receipts,
        )
        protocol.say_copied(shard, copied.rows)
        left = [item for position, item in enumerate(work) if position not in copied.receipts]
        total = sum(len(item.input_ids) for item in left)
        captured = capture(
            left,
            endpoint=endpoint,
            options=options,
            copied_rows={shard: copied.rows},
            progress=ProgressFile(
                folder, shard_id=tokens.shard_id, total=total, server=endpoint.url
            ).add,
        )
        seconds = time.monotonic() - start
        receipts = folder / "receipts.json"
        make_receipts(
            tokens,
            spec=spec,
            engines={engine, *copied.engines},
            selftests={*([selftest] if selftest else []), *copied.selftests},
            images={
                "server": tuple(distinct([server_image, *copied.images])),
                "extract": (present_image(),),
            },
            captured=captured,
            chosen=chosen,
            copied=copied.receipts,
        ).publish(receipts)
        withdraw_manifest(
            capture_folder.folder, {tokens.shard_id}, "is a new file that is not yet verified"
        )
        publish(recaptures, recaptures_of(output), read_only=True)
        publish(receipts, receipts_of(output), read_only=True)
        # The shard comes last: its final name promises that its companions are complete.
        publish(shard, output, read_only=True)
        result_is_complete()
    return {
        "captured_tokens": len(tokens.input_ids) - copied.tokens,
        "copied_tokens": copied.tokens,
        "recaptured_tokens": sum(rows for _, rows in chosen),
        "cached_tokens": sum(item.receipt.cached_tokens for item in captured),
        "compared_tokens": sum(item.receipt.again_rows for item in captured),
        "seconds": round(seconds, 3),
    }


def make_work(
    tokens: ShardTokens,
    *,
    spec: CaptureSpec,
    options: ExtractOptions,
    shard: Path,
    recaptures: Path,
    kind: str = protocol.PLAIN,
    copied: Collection[int] = (),
) -> tuple[list[Work], list[tuple[int, int]]]:
    """Lay out the recaptures file of a laid-out shard; return the work that fills both files.

    Args:
        kind: kind of the samples' requests.
        copied: positions of the samples whose rows the shard already holds.

    Returns:
        every sample, then every prefix recapture; and the position and rows of each recapture.
    """
    starts = np.concatenate([[0], np.cumsum(tokens.lengths)]).tolist()
    places = tokens.segments or Segments.unshared(tokens.lengths)
    key = {"shard_id": tokens.shard_id, "copied": copied, "fraction": options.recapture_fraction}
    compared = choose_compared(tokens.sample_ids, tokens.segments, **key)
    work = [
        Work(
            sample_id=name,
            shard=shard,
            first_row=int(places.ends[i]),
            shared=places.shared(i),
            owners=tuple(int(places.ends[owner]) for owner in places.owners(i)),
            input_ids=tokens.input_ids[starts[i] : starts[i + 1]],
            kind=kind,
            compared=i in compared,
        )
        for i, name in enumerate(tokens.sample_ids)
    ]
    chosen = choose_recaptures(
        tokens.sample_ids,
        tokens.lengths,
        minimum=options.recapture_minimum,
        segments=tokens.segments,
        **key,
    )
    pieces = [slice(starts[i], starts[i] + rows) for i, rows in chosen]
    layout.create(
        recaptures,
        spec=spec,
        shard_id=tokens.shard_id,
        sample_ids=[tokens.sample_ids[i] for i, _ in chosen],
        lengths=[rows for _, rows in chosen],
        input_ids=np.concatenate([tokens.input_ids[piece] for piece in pieces]),
        loss_mask=np.concatenate([tokens.loss_mask[piece] for piece in pieces]),
    )
    first = 0
    for (position, rows), piece in zip(chosen, pieces, strict=True):
        work.append(
            Work(
                sample_id=tokens.sample_ids[position],
                shard=recaptures,
                first_row=first,
                input_ids=tokens.input_ids[piece],
                prefix=True,
            )
        )
        first += rows
    return work, chosen


def capture(
    work: list[Work],
    *,
    endpoint: Endpoint,
    options: ExtractOptions,
    copied_rows: Mapping[Path, int] = MappingProxyType({}),
    progress: Callable[[int], None] = lambda tokens: None,
) -> list[Captured]:
    """Send all requests and wait until the server has synced every file.

    Args:
        copied_rows: rows of each file that are not captured, since they were copied into it.
        progress: called with the tokens of each finished sample.

    Raises:
        UserError: names each sample that could not be captured, and why; `WaitedInVain` if the
            server answered and a receipt did not come.
    """
    rows: Counter[Path] = Counter()
    for item in work:
        rows[item.shard] += item.rows

    async def send() -> list[Captured]:
        async with Client(endpoint, tokens_in_flight=options.tokens_in_flight) as client:
            captured, reasons = await client.capture(
                work, retries=options.retries, progress=progress
            )
            if reasons:
                error = WaitedInVain if client.waited_in_vain else UserError
                raise error(_failure(work, reasons, options.retries))
            # A completely copied file is not among them: the server never opens it.
            for path, count in rows.items():
                await client.synced(path, rows=count + copied_rows.get(path, 0))
        return captured

    return asyncio.run(send())


def _failure(work: list[Work], reasons: dict[int, str], retries: int) -> str:
    """Return the message that names the samples which could not be captured."""
    named: dict[str, str] = {}
    for position, reason in reasons.items():
        named.setdefault(work[position].sample_id, reason)
    lines = [f"  {name}: {reason}" for name, reason in list(named.items())[:20]]
    more = [f"  … and {len(named) - 20} more"] if len(named) > 20 else []
    return "\n".join(
        [
            f"{counted(len(named), 'sample')} could not be captured in"
            f" {counted(retries + 1, 'attempt')}:"
        ]
        + lines
        + more
        + [
            "To try once more: snakemake --cores all. To go on without them, add their ids to"
            " `exclude` in the configuration."
        ]
    )


def make_receipts(
    tokens: ShardTokens,
    *,
    spec: CaptureSpec,
    engines: set[str],
    images: Images,
    captured: list[Captured],
    chosen: list[tuple[int, int]],
    copied: Mapping[int, SampleReceipt] = MappingProxyType({}),
    selftests: Collection[str] = (),
) -> ShardReceipts:
    """Return the receipts of a shard.

    Args:
        engines: versions of the engines that captured the rows.
        images: images of the server and of the extraction.
        captured: captured samples and prefix recaptures in the order of `make_work`.
        chosen: position and rows of each prefix recapture.
        copied: receipts of the copied samples by position; they are not in `captured`.
        selftests: ids of the self-test rows that the capturing servers agreed with.
    """
    done = iter(captured)
    samples = [
        copied[position] if position in copied else _sample_receipt(next(done))
        for position in range(len(tokens.sample_ids))
    ]
    recaptures = [
        _sample_receipt(item, position=position)
        for item, (position, _) in zip(done, chosen, strict=True)
    ]
    return ShardReceipts(
        shard_id=tokens.shard_id,
        capture_key=spec.key,
        engine=Engine(name="sglang", version=", ".join(sorted(engines))),
        images=images,
        samples=tuple(samples),
        recaptures=tuple(recaptures),
        selftests=tuple(sorted(selftests)),
    )


def _sample_receipt(item: Captured, *, position: int | None = None) -> SampleReceipt:
    """Return the receipt of a sample, or of a prefix recapture, as the shard's receipts hold it.

    Args:
        position: position of the recaptured sample in the shard; None for a sample itself.
    """
    receipt = item.receipt
    own = {
        "prompt_tokens": item.prompt_tokens,
        "top": item.top,
        "attempts": item.attempts,
        "namespace": item.namespace,
        "again_rows": receipt.again_rows,
        "again_distance": receipt.again_distance,
    }
    return SampleReceipt(
        sample_id=item.work.sample_id,
        first_row=item.work.first_row,
        rows=receipt.rows,
        shared_rows=item.work.shared,
        chunks=receipt.chunks,
        cached_tokens=receipt.cached_tokens,
        ids_hash=receipt.ids_hash,
        checksum=receipt.checksum,
        position=position,
        last_state=receipt.last_state,
        **(own if position is None else {"next_tokens": item.rows}),
    )

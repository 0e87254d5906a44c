"""The self-test of a server, which decides whether its address is announced.

The server captures samples twice; they must pass every check of a shard. The supervisor runs the
self-test as `python -m draftstates.verify.selftest`. Its result is the attestation.
"""

import argparse
import contextlib
import dataclasses
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftstates import ids
from draftstates.capture.every_layer import row_distances
from draftstates.errors import LastingError, UserError, run_command
from draftstates.extract import protocol
from draftstates.extract.client import Endpoint, WaitedInVain
from draftstates.extract.extract import ExtractOptions, capture, make_receipts, make_work
from draftstates.extract.staging import building_folder, remove_empty
from draftstates.files import publish_json
from draftstates.model.digest import check_content
from draftstates.model.folder import ModelFolder
from draftstates.model.lengths import SHORT, prompt_length, switch_length
from draftstates.paths import Results
from draftstates.plan.shard_tokens import ShardTokens
from draftstates.records import Plan, PlannedChecks, PlannedShard
from draftstates.server.address import health, read_address, server_info
from draftstates.shards import layout
from draftstates.shards.layout import Shard
from draftstates.spec import CaptureSpec
from draftstates.verify import opinions
from draftstates.verify.agreement import (
    agreed_server,
    agreed_settings,
    check_agreement,
    check_code,
)
from draftstates.verify.kept_rows import keep_or_compare
from draftstates.verify.verify import verify_shard

_OPTIONS = ExtractOptions(recapture_fraction=1.0, recapture_minimum=3, retries=0)
_HEALTH_SECONDS = 30.0
_SHORT_PROMPTS = (10, 64, 300)
# Above this many rows SGLang sums over tensor parallel ranks in another way.
_OTHER_SUM = 2048
_BEYOND = 100
# A CPU sums in one way. There a prompt crosses a chunk only where that takes seconds.
_MOST_ON_A_CPU = 1024
_FLAGS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "device",
    "tp_size",
    "dp_size",
    "attn_dp_size",
    "disable_radix_cache",
    "chunked_prefill_size",
    "attention_backend",
)


def attest(
    endpoint: Endpoint,
    *,
    spec: CaptureSpec,
    model: Path,
    earlier: Sequence[Path] = (),
    rows: Path | None = None,
    parity_tokens: int = SHORT,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Capture the self-test's samples twice and check promises 2 to 4 and 6 on them.

    The self-test also holds each r_k against a second reading, see `opinions`.

    Args:
        earlier: attestations of servers that captured under the same key, if they exist.
        rows: where the rows of every layer are kept for parity, see `kept_rows`; None to keep
            none.
        parity_tokens: tokens that the prompt of these rows may have.
        trust_remote_code: whether the server shall run Python code in the model's folder.

    Returns:
        the attestation: capture key, engine, flags, settings and the self-test's figures.

    Raises:
        UserError: names the check that failed and what is missing.
    """
    check_content(ModelFolder(model), expected=spec.model_digest)
    info, text = server_info(endpoint.url, api_key=endpoint.api_key), ModelFolder(model).text
    started = time.monotonic()
    tokens = self_test_tokens(ModelFolder(model).vocab_size, lengths=prompt_lengths(info, text))
    selftest = Results(endpoint.root).selftest(socket.gethostname())
    with (
        _removed_when_empty(Results(endpoint.root).selftests),
        _removed_when_empty(selftest.parent),
        building_folder(selftest, tokens.shard_id) as folder,
    ):
        first, figures, found = _pass(
            folder / "first",
            tokens,
            endpoint=endpoint,
            spec=spec,
            model=model,
            engine=info["version"],
        )
        second, others, _ = _pass(
            folder / "second",
            tokens,
            endpoint=endpoint,
            spec=spec,
            model=model,
            engine=info["version"],
        )
        server = agreed_server([*figures.pop("servers"), *others["servers"]])
        repeat = max(
            row_distances(
                second.state_rows(name, 0, second.header.rows),
                first.state_rows(name, 0, first.header.rows),
            )
            .max()
            .item()
            for name in first.header.states()
        )
        opinions.check_repeat(repeat, spec=spec)
        kept = rows and keep_or_compare(
            rows,
            folder=folder,
            tokens=fitting(prompt_length(text, most=parity_tokens), info, text),
            text=text,
            endpoint=dataclasses.replace(endpoint, server=server),
            spec=spec,
        )
    settings, mark = figures.pop("settings"), figures.pop("weights")
    check_code(settings, trust_remote_code=trust_remote_code)
    check_agreement(settings, capture_key=spec.key, attestations=earlier)
    if mark:
        # The server's weights were updated: it refuses requests until it sees this file.
        passed = Results(endpoint.root).passed(mark)
        passed.parent.mkdir(exist_ok=True)
        passed.unlink(missing_ok=True)
        passed.touch(exist_ok=False)
    return {
        "format": "draftstates.attestation",
        "format_version": 1,
        "capture_key": spec.key,
        "engine": {"name": "sglang", "version": info["version"]},
        "flags": {name: info.get(name) for name in _FLAGS},
        "server": server,
        "settings": settings,
        "capture": dataclasses.asdict(spec),
        "self_test": {
            **figures,
            **found,
            "longest_prompt": max(tokens.lengths),
            "repeat_distance": repeat,
            "rows": kept,
            "seconds": round(time.monotonic() - started, 2),
        },
    }


@contextlib.contextmanager
def _removed_when_empty(folder: Path) -> Iterator[None]:
    """Remove a folder when the block ends, unless the self-test of another host uses it."""
    try:
        yield
    finally:
        remove_empty(folder)


def self_test_tokens(vocabulary: int, *, lengths: tuple[int, ...]) -> ShardTokens:
    """Return the self-test's samples.

    Their ids are always the same, so a cache would skip the second pass.
    """
    draw = np.random.default_rng(20261129)
    parts = [draw.integers(0, vocabulary, length).astype(np.int32) for length in lengths]
    names = [ids.sample_id(part, np.ones(len(part))) for part in parts]
    return ShardTokens(
        shard_id=ids.shard_id(names),
        sample_ids=names,
        lengths=list(lengths),
        input_ids=np.concatenate(parts),
        loss_mask=np.ones(sum(lengths), np.uint8),
    )


def prompt_lengths(info: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens of each prompt: one crosses a chunk of prefill and is summed in two ways.

    Args:
        info: what the server says of itself.
        text: the language model's part of `config.json`.
    """
    chunk = info.get("chunked_prefill_size") or 0
    cpu = info.get("device") == "cpu"
    if cpu and chunk > _MOST_ON_A_CPU:
        return _SHORT_PROMPTS
    longest = (max(chunk, 0) if cpu else max(chunk, _OTHER_SUM)) + _BEYOND
    longest = fitting(longest, info, text)
    return (*_SHORT_PROMPTS, longest) if longest > _SHORT_PROMPTS[-1] else _SHORT_PROMPTS


def fitting(tokens: int, info: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    """Return so many tokens, or the longest prompt that the server takes if that is less.

    Args:
        info: what the server says of itself.
        text: the language model's part of `config.json`.
    """
    # One token is generated after the prompt.
    room = [info.get("max_total_num_tokens"), info.get("context_length")]
    room.append(text.get("max_position_embeddings"))
    # exactly so many tokens are still rotated as short prompts are
    switch = switch_length(text)
    tokens = min(tokens, switch) if switch else tokens
    return min([tokens, *(each - 1 for each in room if isinstance(each, int) and each > 0)])


def _pass(
    folder: Path,
    tokens: ShardTokens,
    *,
    endpoint: Endpoint,
    spec: CaptureSpec,
    model: Path,
    engine: str,
) -> tuple[Shard, dict[str, Any], dict[str, Any]]:
    """Capture the self-test's samples once and verify them like a shard.

    Returns:
        the shard, its figures, and the distances from second readings.
    """
    folder.mkdir()
    shard, recaptures, receipts = (
        folder / "shard.safetensors",
        folder / "recaptures.safetensors",
        folder / "receipts.json",
    )
    layout.create(shard, spec=spec, **vars(tokens))
    work, chosen = make_work(
        tokens,
        spec=spec,
        options=_OPTIONS,
        shard=shard,
        recaptures=recaptures,
        kind=protocol.SELF_TEST,
    )
    captured = capture(work, endpoint=endpoint, options=_OPTIONS)
    make_receipts(
        tokens, spec=spec, engines={engine}, images={}, captured=captured, chosen=chosen
    ).publish(receipts)
    found = opinions.check(
        captured[: len(tokens.sample_ids)], spec=spec, text=ModelFolder(model).text
    )
    verified = verify_shard(
        _planned(tokens, spec),
        spec=spec,
        checks=PlannedChecks(
            recapture_fraction=_OPTIONS.recapture_fraction,
            recapture_minimum=_OPTIONS.recapture_minimum,
        ),
        model=model,
        shard=shard,
        recaptures=recaptures,
        receipts=receipts,
        threads=1,
    )
    figures = {"samples": len(verified.samples), "tokens": sum(verified.samples.tokens)}
    # a capture may lack layers or final states: the attestation names the states that were checked
    figures["checked"] = [size.layer for size in verified.sizes]
    asked = captured[: len(tokens.sample_ids)]
    figures |= {"settings": agreed_settings(asked), "weights": asked[-1].weights}
    figures |= {"servers": [each.server for each in captured]}
    found |= opinions.check_embeddings(Shard(shard), tokens, spec=spec, model=ModelFolder(model))
    return Shard(shard), figures | dataclasses.asdict(verified.figures), found


def _planned(tokens: ShardTokens, spec: CaptureSpec) -> PlannedShard:
    samples, count = len(tokens.sample_ids), len(tokens.input_ids)
    return PlannedShard(
        shard_id=tokens.shard_id,
        source="self-test",
        samples=samples,
        tokens=count,
        supervised_tokens=int(tokens.loss_mask.sum()),
        bytes=spec.shard_bytes(samples=samples, tokens=count),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--address", type=Path, required=True, help="address file of the server to test"
    )
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--root", type=Path, required=True, help="folder below which the server writes"
    )
    parser.add_argument(
        "--parity-tokens", type=int, required=True, help="tokens that parity's prompt may have"
    )
    parser.add_argument(
        "--radix-cache", action="store_true", help="the server keeps one: ask in new namespaces"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="the server shall run the model's code"
    )
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    address, plan = read_address(arguments.address), Plan.read(arguments.plan)
    spec = plan.capture
    capture = Results.of_plan(arguments.plan).capture(plan.capture_folder)
    endpoint = Endpoint(
        url=address.url,
        api_key=address.api_key,
        root=arguments.root,
        fresh_namespace=address.launcher == "external" or arguments.radix_cache,
    )
    try:
        attestation = attest(
            endpoint,
            spec=spec,
            model=arguments.model,
            earlier=[capture.server, arguments.output],
            rows=capture.selftest_rows,
            parity_tokens=arguments.parity_tokens,
            trust_remote_code=arguments.trust_remote_code,
        )
    except WaitedInVain:
        raise
    except UserError as error:
        # A server that still answers was refused for what it did, which it would do again.
        if health(address.url, seconds=_HEALTH_SECONDS) is None:
            raise LastingError(str(error)) from error
        raise
    # Replicas are tested at the same time, also on other nodes. The last attestation stays.
    publish_json({**attestation, "launcher": address.launcher}, arguments.output)
    if address.launcher == "external":
        # Nobody else notices when it is started again.
        dataclasses.replace(address, server=attestation["server"]).write(arguments.address)


if __name__ == "__main__":
    run_command(main)

"""Answers by the target model: every sampled token agrees with the captured state before it, and
each way in which the two servers can differ is found.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from captured import (
    VOCABULARY,
    Captured,
    Files,
    capture,
    most_likely,
    next_tokens,
    states_of,
    tiny_model,
    write,
)

from draftstates.errors import ShardRefused, UserError
from draftstates.model.folder import ModelFolder
from draftstates.model.head import Head, read_head
from draftstates.plan.shard_tokens import SampledTokens
from draftstates.records import Verified
from draftstates.shards.layout import Shard
from draftstates.tokens.files import SampleWriter
from draftstates.tokens.turns import Sample
from draftstates.verify.alignment import Rounding
from draftstates.verify.answers import AnswerLimits, check_answers
from draftstates.verify.verify import verify_shard

FORMATS = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
Said = dict[str, SampledTokens]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def head_of(model: Path, final_norm: str = "post_norm") -> Head:
    return read_head(ModelFolder(model), final_norm=final_norm)


def logits_of(captured: Captured, index: int, head: Head) -> torch.Tensor:
    return head.logits(head.inputs(captured.final[index]), dtype=torch.float32)


def as_answered(
    model: Path, *, temperature: float = 0.7, noise: float = 0.0, **formats: str
) -> tuple[Captured, Said]:
    """Return a captured shard whose supervised tokens were sampled, and what that server said.

    Args:
        noise: by how much the server that answered computed the logits otherwise.
    """
    captured = with_open_choices(capture(model, samples=6, **formats))
    head = head_of(model, captured.spec.final_norm)
    draw = torch.Generator().manual_seed(3)
    tokens, said = [], []
    for index, (ids, mask) in enumerate(zip(captured.tokens, captured.masks, strict=True)):
        places = np.flatnonzero(mask)
        logits = logits_of(captured, index, head)[places - 1]
        scaled = logits / (temperature or 1.0)
        chosen = (
            torch.multinomial(scaled.softmax(-1), 1, generator=draw)
            if temperature
            else logits.argmax(-1, keepdim=True)
        )
        logprobs = scaled.log_softmax(-1).gather(1, chosen)[:, 0]
        # a temperature below 1 enlarges it
        spread = noise / (temperature or 1.0)
        logprobs = logprobs + spread * torch.randn(len(places), generator=draw)
        tokens.append(ids.copy())
        tokens[-1][places] = chosen[:, 0].numpy()
        said.append(SampledTokens(logprobs=logprobs.numpy(), temperature=temperature))
    again = with_open_choices(states_of(tokens, captured.masks, spec=captured.spec, model=model))
    return again, dict(zip(again.names, said, strict=True))


def with_open_choices(captured: Captured) -> Captured:
    """Give a captured shard final states after which many tokens are likely."""
    draw = torch.Generator().manual_seed(11)
    dtype = captured.spec.torch_dtype
    captured.final = [
        torch.randn(states.shape, generator=draw).to(dtype) for states in captured.final
    ]
    captured.again_final = [captured.final[place][:rows] for place, rows in captured.recaptures]
    head = head_of(captured.model, captured.spec.final_norm)
    logprobs = [
        logits_of(captured, index, head).log_softmax(-1) for index in range(len(captured.final))
    ]
    captured.top = [most_likely(each[-1], 5) for each in logprobs]
    captured.again_next = [
        next_tokens(logprobs[place][:rows], captured.tokens[place][1:rows])
        for place, rows in captured.recaptures
    ]
    return captured


def check(captured: Captured, said: Said, folder: Path, **others: Head) -> tuple[set, dict, int]:
    """Return the samples that the check names, the shares of the limit, and the tokens."""
    rounding = Rounding.of(captured.spec)
    findings, shares, tokens = check_answers(
        Shard(write(captured, folder).shard),
        said,
        head=others.get("head", head_of(captured.model, captured.spec.final_norm)),
        rounding=rounding,
        limits=AnswerLimits.of(rounding),
    )
    assert {finding.check for finding in findings} <= {"answers"}
    return {finding.sample_id for finding in findings}, shares, tokens


@pytest.mark.parametrize("temperature", [0.0, 0.05, 0.7, 2.0])
@pytest.mark.parametrize(("compute", "stored"), FORMATS)
@pytest.mark.parametrize("final_norm", ["post_norm", "pre_norm"])
def test_true_answers_pass(
    model, tmp_path, compute: str, stored: str, final_norm: str, temperature: float
) -> None:
    formats = {"compute_dtype": compute, "stored_dtype": stored, "final_norm": final_norm}
    noise = 1e-5 if stored == "float32" else 1e-3
    captured, said = as_answered(model, temperature=temperature, noise=noise, **formats)
    named, shares, tokens = check(captured, said, tmp_path)
    assert named == set()
    assert tokens == sum(int(mask.sum()) for mask in captured.masks)
    assert 0 < max(shares.values()) < 1


def late(captured: Captured, said: Said, model: Path) -> None:
    captured.final = [states.roll(1, dims=0) for states in captured.final]


def one_late_row(captured: Captured, said: Said, model: Path) -> None:
    captured.final[2][4] = captured.final[2][3]


def larger(captured: Captured, said: Said, model: Path) -> None:
    captured.final = [(states.float() * 1.02).to(states.dtype) for states in captured.final]


def other_temperature(captured: Captured, said: Said, model: Path) -> None:
    for name, each in said.items():
        said[name] = dataclasses.replace(each, temperature=0.8)


def other_prompt(captured: Captured, said: Said, model: Path) -> None:
    """Answer after other prompts: the states before each token are those of other ids."""
    captured.final = [states.roll(3, dims=1) for states in captured.final]


FAULTS = [late, larger, other_temperature, other_prompt]


@pytest.mark.parametrize(("compute", "stored"), FORMATS[:2])
@pytest.mark.parametrize("fault", FAULTS)
def test_servers_that_differ_are_found(
    model, tmp_path, fault: Callable[..., None], compute: str, stored: str
) -> None:
    captured, said = as_answered(model, compute_dtype=compute, stored_dtype=stored)
    fault(captured, said, model)
    named, _, _ = check(captured, said, tmp_path)
    assert None in named


@pytest.mark.parametrize(("compute", "stored"), FORMATS)
def test_one_row_out_of_its_place_is_found(model, tmp_path, compute: str, stored: str) -> None:
    captured, said = as_answered(model, compute_dtype=compute, stored_dtype=stored)
    one_late_row(captured, said, model)
    named, shares, _ = check(captured, said, tmp_path)
    assert named == {captured.names[2]}
    assert shares[captured.names[2]] > 1


def test_another_models_head_is_found(model, tmp_path) -> None:
    captured, said = as_answered(model)
    head = head_of(model)
    other = dataclasses.replace(head, weight=head.weight.flip(0))
    assert None in check(captured, said, tmp_path, head=other)[0]


def test_at_temperature_0_the_most_likely_token_was_sampled(model, tmp_path) -> None:
    captured, said = as_answered(model, temperature=0.7, compute_dtype="float32")
    # drawn at temperature 1, and recorded as greedy: its log probabilities are right
    head, names = head_of(model), captured.names
    for index, name in enumerate(names):
        places = np.flatnonzero(captured.masks[index])
        logprobs = logits_of(captured, index, head)[places - 1].log_softmax(-1)
        own = logprobs[torch.arange(len(places)), captured.tokens[index][places].astype(int)]
        said[name] = SampledTokens(logprobs=own.numpy(), temperature=0.0)
    named, shares, _ = check(captured, said, tmp_path)
    assert named
    assert max(shares.values()) < 1


@pytest.mark.parametrize("wrong", [np.nan, -np.inf, 5.0])
def test_a_log_probability_that_is_no_number_is_found(model, tmp_path, wrong: float) -> None:
    captured, said = as_answered(model)
    name = captured.names[1]
    said[name].logprobs[3] = wrong
    assert check(captured, said, tmp_path)[0] == {name}


@pytest.mark.parametrize("change", ["missing", "fewer"])
def test_a_sample_without_its_log_probabilities_is_found(model, tmp_path, change: str) -> None:
    captured, said = as_answered(model)
    name = captured.names[4]
    if change == "missing":
        del said[name]
    else:
        said[name] = dataclasses.replace(said[name], logprobs=said[name].logprobs[:-1])
    assert check(captured, said, tmp_path)[0] == {name}


def test_a_configured_limit_moves_both(model) -> None:
    captured, _ = as_answered(model, compute_dtype="float32", stored_dtype="float32")
    rounding = Rounding.of(captured.spec)
    usual, wide = AnswerLimits.of(rounding), AnswerLimits.of(rounding, 0.01)
    assert (wide.worst, wide.typical) == pytest.approx((0.01, usual.typical * 10))


def write_tokens(captured: Captured, said: Said, folder: Path) -> Path:
    path = folder / f"{captured.shard_id}.parquet"
    with SampleWriter(path) as writer:
        for row, name in enumerate(captured.names):
            sample = Sample(captured.tokens[row], captured.masks[row], **vars(said[name]))
            writer.add(row=row, part=0, sample_id=name, sample=sample)
        writer.finish("a test")
    return path


def verify(files: Files, tokens: Path | None) -> Verified:
    return verify_shard(
        dataclasses.replace(files.plan.shards[0], answered=True),
        spec=files.plan.capture,
        checks=files.plan.checks,
        model=files.model,
        shard=files.shard,
        recaptures=files.recaptures,
        receipts=files.receipts,
        threads=1,
        tokens=tokens,
    )


def test_verification_compares_the_answers_of_a_shard(model, tmp_path) -> None:
    captured, said = as_answered(model)
    files = write(captured, tmp_path / "shards")
    planned = dataclasses.replace(files.plan.shards[0], answered=True)
    verified = verify(files, write_tokens(captured, said, tmp_path))
    assert verified.figures.answer_tokens == planned.supervised_tokens
    assert "answers" in {each.check for each in verified.worst}
    key = files.plan.capture.key
    verified.check(tmp_path, planned=planned, capture_key=key)
    # findings of a time when the source had no answers do not count
    figures = dataclasses.replace(verified.figures, answer_tokens=0)
    earlier = dataclasses.replace(verified, figures=figures)
    with pytest.raises(UserError, match="compared answer tokens"):
        earlier.check(tmp_path, planned=planned, capture_key=key)


def test_the_findings_name_the_limit_of_the_answers(model, tmp_path) -> None:
    captured, said = as_answered(model)
    files = write(captured, tmp_path / "shards")
    tokens = write_tokens(captured, said, tmp_path)
    assert verify(files, tokens).answers_limit is None
    checks = dataclasses.replace(files.plan.checks, answers=0.75)
    files = dataclasses.replace(files, plan=dataclasses.replace(files.plan, checks=checks))
    assert verify(files, tokens).answers_limit == 0.75


def test_verification_refuses_answers_of_another_temperature(model, tmp_path) -> None:
    captured, said = as_answered(model)
    other_temperature(captured, said, model)
    files = write(captured, tmp_path / "shards")
    with pytest.raises(ShardRefused, match="the shard: answers: the two servers differ"):
        verify(files, write_tokens(captured, said, tmp_path))


def test_verification_needs_what_the_server_said(model, tmp_path) -> None:
    captured, said = as_answered(model)
    files = write(captured, tmp_path / "shards")
    with pytest.raises(UserError, match="expected its tokens, to check the answers"):
        verify(files, None)
    nothing = {name: SampledTokens(logprobs=None, temperature=None) for name in said}
    with pytest.raises(UserError, match="expected the log probabilities of its answers"):
        verify(files, write_tokens(captured, nothing, tmp_path))


def test_the_vocabulary_is_larger_than_a_block(model, tmp_path, monkeypatch) -> None:
    from draftstates.model import head

    captured, said = as_answered(model)
    monkeypatch.setattr(head, "_BLOCK", 64)
    assert VOCABULARY > 64
    assert check(captured, said, tmp_path)[0] == set()

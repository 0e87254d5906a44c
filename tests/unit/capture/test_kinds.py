"""Kinds of servers that no tap reaches are told by what their runner holds."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftstates.capture.kinds import check_logits, unreachable
from draftstates.model.family import LogitForm


def _runner(**changes: Any) -> SimpleNamespace:
    algorithm = SimpleNamespace(is_none=lambda: changes.pop("speculative", False) is False)
    return SimpleNamespace(spec_algorithm=algorithm, server_args=SimpleNamespace(**changes))


def _parallel(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"pp_size": 1, "attn_cp_size": 1, "dcp_size": 1, **changes})


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets what the engine's modules say of themselves."""

    def put(*, norms: bool = False, overlap: bool = False, **split: Any) -> None:
        disaggregation = {"enable_pdmux": False, "disaggregation_mode": "null", **split}
        monkeypatch.setitem(
            sys.modules,
            "sglang.srt.layers.layernorm_sp",
            SimpleNamespace(layernorm_sp_enabled=lambda: norms),
        )
        batches = SimpleNamespace(overlap=SimpleNamespace(enable_two_batch_overlap=overlap))
        monkeypatch.setitem(
            sys.modules,
            "sglang.srt.runtime_context",
            SimpleNamespace(
                get_exec=lambda: batches, get_disagg=lambda: SimpleNamespace(**disaggregation)
            ),
        )

    put()
    return put


def test_an_ordinary_server_is_not_refused(engine: Any) -> None:
    assert list(unreachable(_runner(), _parallel())) == []


def test_a_group_that_the_engine_never_made_has_one_rank(engine: Any) -> None:
    class Parallel:
        pp_size = attn_cp_size = 1

        @property
        def dcp_size(self) -> int:
            raise AssertionError("decode context parallel group is not initialized")

    assert list(unreachable(_runner(), Parallel())) == []


@pytest.mark.parametrize(
    ("runner", "parallel", "settings", "named"),
    [
        ({}, {"pp_size": 2}, {}, "pipeline parallel"),
        ({}, {"attn_cp_size": 2}, {}, "context parallel"),
        ({}, {"dcp_size": 4}, {}, "decode context parallel"),
        ({"speculative": True}, {}, {}, "decodes speculatively"),
        ({}, {}, {"norms": True}, "norms are sequence parallel"),
        ({}, {}, {"overlap": True}, "overlaps two batches"),
        ({"enable_two_batch_overlap": True}, {}, {}, "overlaps two batches"),
        ({}, {}, {"enable_pdmux": True}, "pdmux"),
        ({}, {}, {"disaggregation_mode": "prefill"}, "disaggregated"),
    ],
)
def test_each_kind_is_refused_with_its_reason(
    engine: Any, runner: dict, parallel: dict, settings: dict, named: str
) -> None:
    engine(**settings)
    (reason,) = unreachable(_runner(**runner), _parallel(**parallel))
    assert named in reason


def _model(scale: float | None, cap: float | None) -> torch.nn.Module:
    model = torch.nn.Module()
    model.processor = torch.nn.Module()
    model.processor.logit_scale, model.processor.final_logit_softcapping = scale, cap
    return model


def test_logits_of_another_form_than_the_configurations_are_refused() -> None:
    check_logits(_model(None, None), LogitForm())
    check_logits(_model(0.125, 30.0), LogitForm(scale=0.125, cap=30.0))
    for scale, cap in ((0.25, 30.0), (0.125, None), (None, 30.0)):
        with pytest.raises(SystemExit, match="alignment would compute the logits as LogitForm"):
            check_logits(_model(scale, cap), LogitForm(scale=0.125, cap=30.0))


def test_a_head_with_a_bias_that_sglang_leaves_out_is_refused() -> None:
    class ParallelLMHead(torch.nn.Linear):
        pass

    model = torch.nn.Module()
    model.lm_head = ParallelLMHead(4, 3)
    torch.nn.init.zeros_(model.lm_head.bias)
    check_logits(model, LogitForm())
    torch.nn.init.ones_(model.lm_head.bias)
    with pytest.raises(SystemExit, match=r"lm_head.bias: SGLang leaves the bias of its head out"):
        check_logits(model, LogitForm())
    model.lm_head = ParallelLMHead(4, 3, bias=False)
    check_logits(model, LogitForm())

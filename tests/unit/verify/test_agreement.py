"""Servers of one capture key agree in the settings that decide numbers."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftstates.errors import UserError
from draftstates.verify.agreement import (
    agreed_server,
    agreed_settings,
    check_agreement,
    check_code,
)

SETTINGS = {
    "numbers": {"kv_cache_dtype": "bfloat16", "enable_tf32_matmul": "False"},
    "kernels": {"attention_backend": "fa3"},
}


def changed(part: str, **values: str) -> dict:
    return {**SETTINGS, part: {**SETTINGS[part], **values}}


def test_ranks_that_differ_are_refused() -> None:
    ranks = [SETTINGS, changed("numbers", kv_cache_dtype="fp8_e4m3")]
    captured = [SimpleNamespace(settings=each) for each in ranks]
    assert agreed_settings(captured[:1]) == SETTINGS
    with pytest.raises(UserError, match="kv_cache_dtype fp8_e4m3, but another rank.*had bfloat16"):
        agreed_settings(captured)


def test_a_server_that_says_nothing_is_refused() -> None:
    for captured in ([], [SimpleNamespace(settings=None)]):
        with pytest.raises(UserError, match="settings"):
            agreed_settings(captured)


@pytest.mark.parametrize("names", [["a", "b"], ["a", None], [None], []])
def test_a_self_test_that_several_servers_answer_is_refused(names: list[str | None]) -> None:
    assert agreed_server(["a", "a"]) == "a"
    with pytest.raises(UserError, match="expected all answers of the self-test from one server"):
        agreed_server(names)


def test_a_later_server_with_another_number_format_is_refused(tmp_path: Path) -> None:
    earlier = tmp_path / "server.json"
    earlier.write_text(json.dumps({"capture_key": "k", "settings": SETTINGS}))
    places = [tmp_path / "missing.json", earlier]
    check_agreement(SETTINGS, capture_key="k", attestations=places)
    other = changed("numbers", enable_tf32_matmul="True")
    with pytest.raises(UserError, match=r"enable_tf32_matmul True, but an earlier server .*json"):
        check_agreement(other, capture_key="k", attestations=places)
    check_agreement(other, capture_key="another key", attestations=places)


@pytest.mark.parametrize("allowed", [False, True])
def test_code_of_the_model_runs_where_the_configuration_says_so(allowed: bool) -> None:
    """A server of others may be started with any flags."""
    # the plug-in says nothing where there is no code
    check_code(SETTINGS, trust_remote_code=allowed)
    check_code(changed("numbers", trust_remote_code=str(allowed)), trust_remote_code=allowed)
    other = changed("numbers", trust_remote_code=str(not allowed))
    with pytest.raises(UserError, match=f"expected a server with {allowed}, found {not allowed}"):
        check_code(other, trust_remote_code=allowed)


def test_other_kernels_and_other_versions_are_no_difference(tmp_path: Path) -> None:
    """They follow from hardware and image: neither captures anything again."""
    earlier = tmp_path / "server.json"
    earlier.write_text(json.dumps({"capture_key": "k", "settings": SETTINGS}))
    later = changed("kernels", attention_backend="flashinfer")
    later["numbers"] = {**later["numbers"], "setting_of_tomorrow": "x"}
    check_agreement(later, capture_key="k", attestations=[earlier])
    earlier.write_text(json.dumps({"capture_key": "k", "flags": {}}))
    check_agreement(later, capture_key="k", attestations=[earlier])

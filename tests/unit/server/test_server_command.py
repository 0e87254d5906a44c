"""The command that starts a server."""

from typing import Any

from synthetic import capture_spec

from draftstates.config import resolve
from draftstates.server.command import sglang_command

SPEC = capture_spec()


def command(**server: Any) -> list[str]:
    data = {"sources": [{"name": "none", "files": ["none"]}], "max_tokens": 2}
    return sglang_command(
        resolve(
            {
                "data": data,
                "model": {"path": "m"},
                "capture": {"compute_dtype": "bfloat16"},
                "server": server,
            },
            origin="test",
        ),
        spec=SPEC,
    )


def test_an_idle_server_sleeps() -> None:
    assert "--sleep-on-idle" in command()
    assert "--attn-dp-size" not in command()


def test_ranks_of_data_parallel_attention_do_not_sleep_since_they_wait_for_each_other() -> None:
    found = command(tensor_parallel=8, data_parallel_attention=4)
    assert found[found.index("--tensor-parallel-size") + 1] == "8"
    assert found[found.index("--attn-dp-size") + 1] == "4"
    assert "--sleep-on-idle" not in found

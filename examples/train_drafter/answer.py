"""Answers to prompts by the target model, through the same instrumented server: each row holds the
exact tokens of prompt and answer.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

import aiohttp
from transformers import AutoTokenizer

from draftstates import config
from draftstates.errors import UserError, run_command
from draftstates.files import publish
from draftstates.model.digest import configured_capture
from draftstates.server.address import Address
from draftstates.server.command import server_settings
from draftstates.server.lease import lease

_IN_FLIGHT = 48


async def answer_all(address: Address, prompts: list[list[int]], sampling: dict) -> list[list[int]]:
    """Return the generated ids of every prompt, in the prompts' order.

    Args:
        address: the server's.
        prompts: `input_ids` of each prompt.
        sampling: SGLang's sampling parameters.
    """
    headers = {"Authorization": f"Bearer {address.api_key}"} if address.api_key else {}
    room = asyncio.Semaphore(_IN_FLIGHT)
    done = 0

    async def answer(session: aiohttp.ClientSession, ids: list[int]) -> list[int]:
        nonlocal done
        async with (
            room,
            session.post(
                f"{address.url}/generate", json={"input_ids": ids, "sampling_params": sampling}
            ) as response,
        ):
            body = await response.json()
            if response.status != 200:
                raise UserError(
                    f"{address.url}: expected an answer, found status {response.status}: {body};"
                    " the server's log says why"
                )
        done += 1
        print(f"\r{done}/{len(prompts)} answers", end="", file=sys.stderr, flush=True)
        return body["output_ids"]

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        return await asyncio.gather(*(answer(session, ids) for ids in prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument(
        "--prompts", type=Path, required=True, help="JSONL with messages that end in a user's turn"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument(
        "--output", type=Path, required=True, help="JSONL with input_ids and loss_mask"
    )
    arguments = parser.parse_args()

    settings = config.load(arguments.config)
    tokenizer = AutoTokenizer.from_pretrained(settings.model.path)
    rows = [json.loads(line)["messages"] for line in arguments.prompts.read_text().splitlines()]
    prompts = [
        tokenizer.apply_chat_template(row, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for row in rows
    ]
    sampling = {
        "temperature": arguments.temperature,
        "max_new_tokens": arguments.max_new_tokens,
        "stop_token_ids": [tokenizer.eos_token_id],
    }
    spec = configured_capture(settings)
    # The server's self-test reads from here what it is to capture.
    plan = settings.results / "capture.json"
    plan.write_text(json.dumps({"capture": {**spec.__dict__, "key": spec.key}}, default=list))
    with lease(server_settings(settings, spec=spec, plan=plan)) as address:
        answers = asyncio.run(answer_all(address, prompts, sampling))
    partial = arguments.output.with_name(f".{arguments.output.name}.partial")
    with open(partial, "w") as file:
        for ids, answer in zip(prompts, answers, strict=True):
            file.write(
                json.dumps(
                    {"input_ids": ids + answer, "loss_mask": [0] * len(ids) + [1] * len(answer)}
                )
                + "\n"
            )
    publish(partial, arguments.output)


if __name__ == "__main__":
    run_command(main)

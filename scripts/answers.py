"""Have the leased server answer one chunk of a source's prompts."""

import argparse
import functools
import json
from pathlib import Path

from draftstates.answers.answer import answer_chunk
from draftstates.answers.key import answers_folder
from draftstates.config import load
from draftstates.errors import UserError, run_command
from draftstates.server.command import generate_settings
from draftstates.server.lease import lease
from draftstates.tokens.sources import source_options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--source", required=True, help="name of the source in data.sources")
    parser.add_argument("--prompts", type=Path, required=True, help="the source's prompts")
    parser.add_argument("--chunk-id", required=True)
    parser.add_argument("--output", type=Path, required=True, help="Parquet file of answers")
    arguments = parser.parse_args()
    config = load(arguments.config)
    expected = answers_folder(config, arguments.source)
    if arguments.output.absolute().parent.name != expected:
        raise UserError(
            f"{arguments.output}: expected the folder of the answers' key, {expected}: the model or"
            " the configuration has changed since this run began; run snakemake --cores all"
        )
    _, options = source_options(config, arguments.source)
    chunk = functools.partial(
        answer_chunk,
        arguments.chunk_id,
        prompts=arguments.prompts,
        tokenizer_path=config.model.path,
        options=options,
        output=arguments.output,
    )
    # a server is started for a prompt without an answer alone
    figures = chunk(url=None)
    if figures is None:
        server = generate_settings(config)
        seeded = [*server.command, "--random-seed", str(options.answers.seed)]
        with lease(server.model_copy(update={"command": seeded})) as address:
            figures = chunk(url=address.url, api_key=address.api_key, failed=address.failed)
    print(json.dumps({"chunk_id": arguments.chunk_id, **figures}))


if __name__ == "__main__":
    run_command(main)

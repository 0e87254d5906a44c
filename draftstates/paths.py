"""Every path of the results tree.

A path can also be a pattern of Snakemake: `Results(root).capture("{capture}").shard("{shard_id}")`.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

# A server writes only below a folder of this name: what lies outside is published.
BUILDING = ".building"
SHARD_SUFFIX = ".safetensors"
RECAPTURES_SUFFIX = ".recaptures.safetensors"
RECEIPTS_SUFFIX = ".receipts.json"


def recaptures_of(shard: Path) -> Path:
    """Return the file of a shard's prefix recaptures."""
    return shard.with_suffix(RECAPTURES_SUFFIX)


def receipts_of(shard: Path) -> Path:
    """Return the file of a shard's receipts."""
    return shard.with_suffix(RECEIPTS_SUFFIX)


@dataclasses.dataclass(frozen=True)
class Capture:
    """A capture folder, `results/<model>-<first 8 digits of the capture key>/`."""

    folder: Path

    @classmethod
    def of_shard(cls, shard: Path) -> "Capture":
        """Return the capture folder that a shard lies in."""
        return cls(shard.parent.parent)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def shards(self) -> Path:
        return self.folder / "shards"

    def shard(self, shard_id: str) -> Path:
        return self.shards / f"{shard_id}{SHARD_SUFFIX}"

    def recaptures(self, shard_id: str) -> Path:
        return recaptures_of(self.shard(shard_id))

    def receipts(self, shard_id: str) -> Path:
        return receipts_of(self.shard(shard_id))

    def compact(self, shard_id: str, form: str) -> Path:
        """Return the compact form of a shard.

        Args:
            form: name of the form, see `config.StorageOptions.form`.
        """
        return self.folder / "compact" / form / f"{shard_id}{SHARD_SUFFIX}"

    def stored(self, shard_id: str, form: str) -> Path:
        """Return the file that says what a shard's compact form holds; it is written last."""
        return self.compact(shard_id, form).with_suffix(".json")

    def verified(self, shard_id: str) -> Path:
        """Return the file that says what verification found of a shard."""
        return self.verified_folder / f"{shard_id}.json"

    @property
    def verified_folder(self) -> Path:
        return self.folder / "verified"

    @property
    def building(self) -> Path:
        """The folder of unfinished shards."""
        return self.shards / BUILDING

    @property
    def server(self) -> Path:
        """The server's attestation, as the rule `server` publishes it."""
        return self.folder / "server.json"

    @property
    def selftest_rows(self) -> Path:
        """The rows of every layer that the first server captured in its self-test.

        Every later server agreed with them, and parity is the comparison of them.
        """
        return self.folder / "selftest.safetensors"

    @property
    def parity(self) -> Path:
        """The comparison of the self-test's rows with the checkpoint."""
        return self.folder / "parity.json"

    @property
    def parity_page(self) -> Path:
        """The same as a page for people."""
        return self.folder / "parity.html"

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def samples(self) -> Path:
        return samples_of(self.manifest)

    def export(self, trainer: str) -> Path:
        """Return the summary of an export; the trainer's files lie beside it."""
        return self.folder / "exports" / trainer / "export.json"

    def shard_ids(self) -> set[str]:
        """Return the ids of the shards whose states are on the disk."""
        return {
            path.stem
            for path in self.shards.glob(f"*{SHARD_SUFFIX}")
            if not path.name.endswith(RECAPTURES_SUFFIX)
        }

    def whole_shard_ids(self) -> set[str]:
        """Return the ids of the shards that are on the disk with recaptures and receipts."""
        names = set(os.listdir(self.shards)) if self.shards.is_dir() else set()
        return {
            shard_id
            for shard_id in (name.removesuffix(SHARD_SUFFIX) for name in names)
            if names.issuperset(
                path(shard_id).name for path in (self.shard, self.recaptures, self.receipts)
            )
        }

    def stored_ids(self, form: str | None = None) -> set[str]:
        """Return the ids of the shards with a compact form, all that vouches for it included.

        Args:
            form: name of the form; None for any.
        """
        return {
            path.stem
            for path in self.folder.glob(f"compact/{form or '*'}/*.json")
            if path.with_suffix(SHARD_SUFFIX).exists()
            and self.verified(path.stem).exists()
            and self.receipts(path.stem).exists()
        }

    def present_ids(self, form: str | None) -> set[str]:
        """Return the ids of the shards that need no capture in a form; None: as captured."""
        return self.whole_shard_ids() if form is None else self.stored_ids(form)

    def begun_shard_ids(self) -> set[str]:
        """Return the ids of the shards that have at least one file on the disk."""
        suffixes = (RECAPTURES_SUFFIX, RECEIPTS_SUFFIX, SHARD_SUFFIX)
        files = [*self.shards.iterdir(), *self.folder.glob(f"compact/*/[!.]*{SHARD_SUFFIX}")]
        return {path.name.split(".")[0] for path in files if path.name.endswith(suffixes)}

    def verified_ids(self) -> set[str]:
        """Return the ids of the shards that have passed verification."""
        return {path.stem for path in self.verified_folder.glob("*.json")}


def samples_of(manifest: Path) -> Path:
    """Return the table of samples that belongs to a manifest."""
    return manifest.with_name("samples.parquet")


@dataclasses.dataclass(frozen=True)
class Results:
    """The results folder, `results` of the configuration."""

    root: Path

    @classmethod
    def of_plan(cls, plan: Path) -> "Results":
        """Return the results folder that a plan lies in."""
        return cls(plan.parent)

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def tokens_folder(self) -> Path:
        return self.root / "tokens"

    def tokens(self, source: str) -> Path:
        """Return the file of a source's samples."""
        return self.tokens_folder / f"{source}.parquet"

    def accounting(self, source: str) -> Path:
        """Return the file that accounts for every row of a source."""
        return self.tokens_folder / f"{source}.json"

    def hub_record(self, source: str) -> Path:
        """Return the file that says which commit of the hub's data set a source reads."""
        return self.root / "hub" / f"{source}.json"

    def prompts(self, source: str) -> Path:
        """Return the file of a source's prompts, for answers by the target model."""
        return self.root / "answers" / source / "prompts.parquet"

    def prompt_chunks(self, source: str) -> Path:
        """Return the file that says how a source's prompts are cut into chunks."""
        return self.prompts(source).with_suffix(".json")

    def answers(self, source: str, key: str) -> Path:
        """Return the folder of answers to a source's prompts, with one file per chunk.

        Args:
            key: name of the folder, as `answers_folder` gives it.
        """
        return self.prompts(source).parent / key

    @property
    def shard_tokens_folder(self) -> Path:
        return self.tokens_folder / "shards"

    def shard_tokens(self, shard_id: str) -> Path:
        """Return the file of a planned shard's tokens."""
        return self.shard_tokens_folder / f"{shard_id}.parquet"

    def config(self, digest: str) -> Path:
        """Return the file of a resolved configuration."""
        return self.root / "config" / f"{digest}.yaml"

    @property
    def server_state(self) -> Path:
        """The folder where the clients and the supervisor of a server agree."""
        return self.root / ".server"

    @property
    def attestation(self) -> Path:
        """What the last self-test of a server found."""
        return self.server_state / "attestation.json"

    @property
    def server_log(self) -> Path:
        return self.server_state / "server.log"

    @property
    def containers(self) -> Path:
        """The scratch folder of containers."""
        return self.root / ".containers"

    @property
    def lock(self) -> Path:
        """The file that a run locks as long as it lasts."""
        return self.root / ".run.lock"

    def log(self, *parts: str) -> Path:
        """Return the log of a rule: `log("plan")`, `log("{capture}", "extract", "{shard_id}")`."""
        return self.root.joinpath("logs", *parts[:-1], f"{parts[-1]}.log")

    def benchmark(self, *parts: str) -> Path:
        """Return the benchmark of a rule; its parts are those of `log`."""
        return self.root.joinpath("benchmarks", *parts[:-1], f"{parts[-1]}.tsv")

    @property
    def report_page(self) -> Path:
        """The report of a run."""
        return self.root / "report" / "index.html"

    @property
    def tokens_page(self) -> Path:
        """The report of tokens alone."""
        return self.root / "report" / "tokens.html"

    def vocabulary(self, key: str) -> Path:
        """Return the folder of a drafter's vocabulary."""
        return self.root / "vocabulary" / key

    @property
    def selftests(self) -> Path:
        """The folder of all self-tests."""
        return self.root / ".selftest"

    def selftest(self, host: str) -> Path:
        """Return the folder where the self-test of a server on this host captures."""
        return self.selftests / BUILDING / host

    def passed(self, mark: str) -> Path:
        """Return the file that says that a server has passed a self-test after an update."""
        return self.selftests / f"passed-{mark}"

    def capture(self, name: str) -> Capture:
        return Capture(self.root / name)

    def captures(self) -> list[Capture]:
        """Return the capture folders that have shards, in the order of their names."""
        return [
            Capture(shards.parent)
            for shards in sorted(self.root.glob("*/shards"))
            if shards != self.shard_tokens_folder
        ]

    def made_by_rules(self) -> Iterator[Path]:
        """Give the files on the disk that rules make or read, logs and benchmarks apart."""
        for pattern in (
            *("plan.json", "hub/*.json", "tokens/*.parquet", "tokens/*.json"),
            *("answers/*/prompts.*", "answers/*/*/*.parquet"),
            *("*/server.json", "*/parity.*", "*/shards/[!.]*", "*/verified/*.json"),
            "*/compact/*/[!.]*",
            *("*/manifest.json", "*/samples.parquet", "*/exports/*/export.json"),
            *("report/*.html",),
        ):
            yield from sorted(self.root.glob(pattern))

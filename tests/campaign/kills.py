"""Kills at random: any processes of a run are killed at any moment, and nothing bad may be left.

    python tests/campaign/kills.py --folder /tmp/kills --rounds 50 [--seed 7] [--slurm]

The workflow is real, and so are leases, supervisor, keeper and Snakemake's plug-in for Slurm. The
server is a stub, and the states are random ones that verification accepts. In each round a run
makes some shards again. At a random moment one or two of its processes, or the whole group of
Snakemake, get KILL or TERM. Then

- no process of the run is left after some seconds, and with --slurm no job;
- no shard that was complete is gone or made again, except that of a job that got KILL itself:
  Snakemake removes what such a job has made, even if only its last moment was still to come;
- the next run completes (after --unlock, where Snakemake says so);
- the manifest lists every shard, and every sample reads as it did at first.

With --slurm, Slurm must run on this machine: tests/cluster/slurm.sh.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), *(str(TESTS / name) for name in ("workflow", "cluster"))]

import torch  # noqa: E402
from captured import tiny_model  # noqa: E402
from cluster_harness import FLAGS, HEARTBEAT_SECONDS, Cluster  # noqa: E402
from lease_harness import FILES, Playground, eventually  # noqa: E402
from workspace import Workspace, chat, make_workspace  # noqa: E402

from draftstates import ShardDataset  # noqa: E402
from draftstates.paths import Results  # noqa: E402
from draftstates.server.settings import ServerSettings  # noqa: E402

# a run whose processes are all killed is gone by then
_LEFT_SECONDS = 10.0
_LATENCY_SECONDS = float(FLAGS[FLAGS.index("--latency-wait") + 1])
# a run that goes on, or that finishes its running jobs, has ended by then
_RUN_SECONDS = 400.0
# runs a stand-in with the tests' helpers
_STAND_IN = """
import runpy, sys
sys.path.insert(0, {tests!r})
runpy.run_path({script!r}, run_name="__main__")
"""
_STUB = ("--helpers", "1", "--delay", "0.5")


class Campaign:
    """One workspace, whose shards are made again in each round.

    Args:
        folder: folder to make.
        seed: seed of all random choices.
        slurm: whether servers and steps are Slurm jobs.
    """

    def __init__(self, folder: Path, *, seed: int, slurm: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.random = random.Random(seed)
        # open descriptors of complete shards: the inode of an open file is given to no other
        self._open: list[int] = []
        self._play = Playground(folder / "work")
        self._cluster = Cluster(self._play) if slurm else None
        changes: dict[str, Any] = {"idle_seconds": 20.0, "stop_seconds": 2.0}
        state = folder / "work/results/.server"
        settings = (
            self._cluster.settings(*_STUB, state=state, **changes)
            if self._cluster
            else self._play.settings(*_STUB, state=state, **changes)
        )
        self._flags = tuple(FLAGS) if slurm else ()
        os.environ.update(self._play.environment())
        began = time.monotonic()
        self._workspace = _workspace(self._play.folder, settings)
        if slurm:
            shutil.copy(TESTS / "cluster/elsewhere/sitecustomize.py", self._play.folder)
            with open(self._play.folder / "Snakefile", "a") as file:
                file.write(f'\n\ninclude: "{FILES / "quick_looks.smk"}"\n')
        self._workspace.run(*self._flags)
        # the next runs make fewer files, and start no slower
        self._seconds = time.monotonic() - began
        (self._capture,) = Results(self._workspace.results).captures()
        self._samples = _read(self._capture.manifest)

    def round(self, *, within: float | None = None) -> str:
        """Kill a run, and see the next one complete; return what was killed.

        Args:
            within: seconds that a run takes; by default those of the first run, which made all.
        """
        missing = self._forget_some()
        complete = self._complete()
        self._killed_jobs: list[str] = []
        run = self._start()
        began, moment = time.monotonic(), self.random.uniform(0.0, within or self._seconds)
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = run.wait(timeout=moment)
            assert not status, f"a run that nobody has killed ended with {status}"
            # nothing was left to kill
            return self.round(within=time.monotonic() - began)
        told = f"after {moment:.1f} s of a run for {missing} shards: " + self._kill(run)
        try:
            complete |= self._complete()
            status = run.wait(timeout=_RUN_SECONDS)
            told += f"; snakemake ended with {status}"
            complete |= self._complete()
            self._see_nothing_left()
            self._see_the_next_run_complete(complete)
        except AssertionError as error:
            raise AssertionError(f"{told}\n{error}") from error
        finally:
            self.end()
        return told

    def end(self) -> None:
        """End whatever is left of a run."""
        self._play.end()
        while self._open:
            os.close(self._open.pop())

    def _forget_some(self) -> int:
        """Remove some shards, what was made of them, and sometimes the attestation."""
        capture = self._capture
        shards = sorted(capture.whole_shard_ids())
        chosen = self.random.sample(shards, k=self.random.randint(2, len(shards)))
        for shard_id in chosen:
            paths = (capture.shard(shard_id), capture.recaptures(shard_id))
            for path in (*paths, capture.receipts(shard_id), capture.verified(shard_id)):
                path.unlink(missing_ok=True)
        if self.random.random() < 0.5:
            capture.server.unlink()
        return len(chosen)

    def _complete(self) -> set[tuple[Path, int]]:
        """Return each complete shard, with its inode. Snakemake changes the time of a shard."""
        found = set()
        for shard_id in self._capture.whole_shard_ids():
            path = self._capture.shard(shard_id)
            # a job that failed may just have been cleared up
            with contextlib.suppress(FileNotFoundError):
                self._open.append(os.open(path, os.O_RDONLY))
                found.add((path, os.fstat(self._open[-1]).st_ino))
        return found

    def _start(self) -> subprocess.Popen:
        start = self._workspace.prepare(*self._flags)
        with open(self._play.folder / "snakemake.log", "ab") as log:
            return subprocess.Popen(**start, stdout=log, stderr=log, process_group=0)

    def _kill(self, run: subprocess.Popen) -> str:
        """Kill one or two processes at once, or the group of Snakemake; return who they were."""
        number = self.random.choice((signal.SIGKILL, signal.SIGTERM))
        how = self.random.choice(("one", "one", "two", "group"))
        if how == "group":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, number)
            return f"{number.name} to the group of snakemake"
        processes = self._play.survivors()
        chosen = self.random.sample(processes, k=min(len(processes), 1 if how == "one" else 2))
        for line in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), number)
        self._killed_jobs = [line for line in chosen if number == signal.SIGKILL]
        return f"{number.name} to {[_short(line) for line in chosen]}"

    def _see_nothing_left(self) -> None:
        seconds = _LEFT_SECONDS
        if self._cluster:
            seconds += HEARTBEAT_SECONDS
            jobs = self._cluster.jobs
            # Steps are jobs of Snakemake, which cannot cancel them once it is killed. They end as
            # soon as they want a server; others are cancelled here, as a person does.
            subprocess.run(["scancel", "--partition", "cpu", "--user", "root"], check=True)
            eventually(lambda: not jobs("gpu"), within=seconds, what="no server job is left")
        # a step that had just begun looks for its run when its libraries are loaded, as long as
        # that takes on this machine now
        loading = [sys.executable, "-c", "import captured"]
        subprocess.run(loading, cwd=TESTS, env=self._play.environment(), check=True)
        began = time.monotonic()
        while left := self._play.survivors():
            # the Snakemake of a job that was cancelled may still look for the files of its step
            patience = {line: _LATENCY_SECONDS if "slurm-jobstep" in line else 0.0 for line in left}
            late = [line for line in left if time.monotonic() - began > seconds + patience[line]]
            assert not late, f"left after {seconds} s: {_described(late)}"
            time.sleep(0.1)

    def _see_the_next_run_complete(self, complete: set[tuple[Path, int]]) -> None:
        complete = {
            (path, inode)
            for path, inode in complete
            if not any(f"--shard-id {path.stem}" in line for line in self._killed_jobs)
        }
        gone = complete - self._complete()
        assert not gone, f"complete shards are gone, or made again: {gone}"
        workspace = self._workspace
        done = workspace.snakemake(*self._flags)
        if "LockException" in done.stdout:
            workspace.run("--unlock")
            done = workspace.snakemake(*self._flags)
        assert done.returncode == 0, f"the next run does not complete:\n{done.stdout}"
        gone = complete - self._complete()
        assert not gone, f"the next run has made complete shards again: {gone}"
        found = _read(self._capture.manifest)
        assert found.keys() == self._samples.keys(), "samples are gone, or new"
        for name, tensors in self._samples.items():
            same = [torch.equal(value, found[name][key]) for key, value in tensors.items()]
            assert all(same), f"sample {name} reads otherwise than at first"
        left = list(self._capture.folder.glob("shards/*.partial"))
        assert not left, f"partial files are left: {left}"


def _workspace(folder: Path, settings: ServerSettings) -> Workspace:
    """Make a workspace whose steps lease the stub server of these settings."""
    model = tiny_model(folder.with_name(f"{folder.name}-model"))
    (model / "tokenizer.json").write_text("{}")
    workspace = make_workspace(folder, model, standins=False)
    workspace.stand_in("tokenise", "report_page")
    folders = (TESTS / "campaign/leased", TESTS / "campaign/standins")
    scripts = [folders[0] / "extract.py", folders[0] / "server.py", folders[1] / "check_parity.py"]
    for script in scripts:
        text = _STAND_IN.format(tests=str(TESTS), script=str(script))
        (folder / "scripts" / script.name).write_text(text)
    (folder / "settings.json").write_text(settings.to_json())
    for source in ("one", "two"):
        workspace.write_rows([chat(f"{source}-{i}") for i in range(6)], source)
    return workspace


def _read(manifest: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of every sample by its id, as a trainer that verifies reads them."""
    dataset = ShardDataset(manifest, verify=True)
    return {dataset.sample_id(i): dataset[i] for i in range(len(dataset))}


def _described(lines: list[str]) -> str:
    """Return processes with their state, parent and signals, as evidence."""
    found = []
    for line in lines:
        folder = Path("/proc") / line.split()[0]
        with contextlib.suppress(OSError):
            status = dict(
                field.split(":\t", 1)
                for field in (folder / "status").read_text().splitlines()
                if ":\t" in field
            )
            what = f"{status['State']}, parent {status['PPid']}, ignores {status['SigIgn']}"
            found.append(f"{line} ({what}, catches {status['SigCgt']})")
    return "\n".join(found)


def _short(line: str) -> str:
    """Return the words that say what a process is."""
    words = ("supervisor", "keeper", "stub_server", "slurm.job", "snakemake", "scripts/", "time.sl")
    return next((word for word in words if word in line), " ".join(line.split()[1:])[-60:])


def main() -> None:
    """Run the campaign of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="new folder")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--slurm", action="store_true", help="on the Slurm of this machine")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    # so that nothing of the campaign is left when it is ended
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    campaign = Campaign(arguments.folder, seed=arguments.seed, slurm=arguments.slurm)
    try:
        for number in range(1, arguments.rounds + 1):
            print(f"{number}: {campaign.round()}", flush=True)
    finally:
        campaign.end()


if __name__ == "__main__":
    main()

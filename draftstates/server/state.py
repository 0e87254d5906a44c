"""The state folder: the files by which the clients of one server and its supervisor agree."""

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class State:
    """The paths in the state folder.

    Attributes:
        start_lock: exclusive while a client or the supervisor decides about a start or a stop.
        lease_lock: shared by each client that needs the server.
        alive_lock: exclusive for the supervisor's life.
        starter_lock: shared by each process of the host that starts supervisors for clients in
            containers.
        wanted: exists until a starter has taken the task to start a supervisor.
        taken: exists from then on until the task is done.
        tree_lock: exclusive until the last process of a server has ended, so that two servers never
            share a GPU.
        address: the replicas that clients may use; exists while at least one is ready.
        uses: folder with a file for each lease on a replica.
        failures: folder with a file for each server that has failed, named by its generation.
        failed: exists from the moment when no server is left until the next start.
        accepted: the owner for whom an external server has passed the self-test.
        candidate: the address of an external server until then.
    """

    folder: Path

    @property
    def start_lock(self) -> Path:
        return self.folder / "start.lock"

    @property
    def lease_lock(self) -> Path:
        return self.folder / "lease.lock"

    @property
    def alive_lock(self) -> Path:
        return self.folder / "alive.lock"

    @property
    def starter_lock(self) -> Path:
        return self.folder / "starter.lock"

    @property
    def wanted(self) -> Path:
        return self.folder / "wanted"

    @property
    def taken(self) -> Path:
        return self.folder / "taken"

    @property
    def tree_lock(self) -> Path:
        return self.folder / "tree.lock"

    @property
    def settings(self) -> Path:
        return self.folder / "settings.json"

    @property
    def pid(self) -> Path:
        return self.folder / "supervisor.pid"

    @property
    def owners(self) -> Path:
        return self.folder / "owners"

    @property
    def key_config(self) -> Path:
        return self.folder / "key.yaml"

    @property
    def candidate(self) -> Path:
        return self.folder / "candidate.json"

    @property
    def address(self) -> Path:
        return self.folder / "address.json"

    @property
    def accepted(self) -> Path:
        return self.folder / "accepted.json"

    @property
    def uses(self) -> Path:
        return self.folder / "uses"

    @property
    def failures(self) -> Path:
        return self.folder / "failures"

    @property
    def failed(self) -> Path:
        return self.folder / "failed.json"

    @property
    def log(self) -> Path:
        return self.folder / "supervisor.log"

    @property
    def selftest_log(self) -> Path:
        return self.folder / "selftest.log"

    def replica(self, index: int) -> Path:
        """Return a replica's own folder."""
        return self.folder / f"replica.{index}"

    def make_folders(self) -> None:
        """Make the folders that hold one file per owner, lease or failure."""
        for folder in (self.owners, self.uses, self.failures):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

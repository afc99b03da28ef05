"""A cluster whose prefill worker's links fail on demand."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.cluster import Cluster, Process, cluster, until
from tests.helpers.models import TINY_FOLDER


@dataclass
class Faults:
    """Switches of `tests.helpers.faulty_prefill_worker`."""

    folder: Path

    def put(self, name: str, value: str = "") -> None:
        """Turn a fault on; the file appears whole."""
        (self.folder / f".{name}").write_text(value)
        (self.folder / f".{name}").rename(self.folder / name)

    def lift(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def lift_all(self) -> None:
        for file in self.folder.iterdir():
            file.unlink(missing_ok=True)

    def is_on(self, name: str) -> bool:
        return (self.folder / name).exists()


@dataclass
class FaultyCluster:
    cluster: Cluster
    faults: Faults

    @property
    def address(self) -> str:
        return self.cluster.address

    def until_counts(self, process: Process, condition: Callable[[Any], bool], what: str) -> None:
        """Wait until a worker's counts are so."""
        until(lambda: condition(self.cluster.counts(process)), what)


@contextmanager
def faulty_cluster(
    folder: Path, *, prefill_args: Sequence[str] = (), **options: Any
) -> Iterator[FaultyCluster]:
    """Start a cluster whose prefill workers read their faults from `folder`."""
    faults = Faults(folder)
    with cluster(
        TINY_FOLDER,
        prefill_module="tests.helpers.faulty_prefill_worker",
        prefill_args=("--faults", str(folder), *prefill_args),
        **options,
    ) as running:
        try:
            yield FaultyCluster(running, faults)
        finally:
            faults.lift_all()

"""What the prefill end keeps count of. Pure: no IO, no clock, no tensors, no threads."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class TransferLedger:
    """One transfer's chunks between announcement and acknowledgement."""

    num_bytes: int = 0
    """Bytes announced so far."""
    last_announced: bool = False
    _unacknowledged: dict[int, int] = field(default_factory=dict)

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes that the other end may be holding in staging for this transfer."""
        return sum(self._unacknowledged.values())

    @property
    def complete(self) -> bool:
        """Whether the last chunk was announced and every chunk acknowledged."""
        return self.last_announced and not self._unacknowledged

    def announced(self, sequence: int, num_bytes: int, *, last: bool) -> None:
        """Note a chunk that goes out."""
        assert not self.last_announced, "a chunk after the last one"
        self._unacknowledged[sequence] = num_bytes
        self.num_bytes += num_bytes
        self.last_announced = last

    def acknowledged(self, sequence: int) -> None:
        """Note an acknowledgement; a second one, or one for a chunk that is not ours, changes nothing."""
        self._unacknowledged.pop(sequence, None)


def split_runs(run_lengths: list[int], max_blocks: int) -> list[list[tuple[int, int, int]]]:
    """Cut a chunk's runs into pieces of at most `max_blocks` blocks, in order.

    Returns:
        For each piece its slices `(run, start, stop)`; blocks `start` .. `stop - 1` of `run_lengths[run]`.
    """
    assert max_blocks > 0, max_blocks
    pieces: list[list[tuple[int, int, int]]] = []
    room = 0
    for run, length in enumerate(run_lengths):
        start = 0
        while start < length:
            if room == 0:
                pieces.append([])
                room = max_blocks
            stop = min(length, start + room)
            pieces[-1].append((run, start, stop))
            room -= stop - start
            start = stop
    return pieces

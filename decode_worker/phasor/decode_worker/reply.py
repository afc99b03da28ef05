"""From token ids to the text a client sees: whole characters only, and never a piece of a stop string."""

from dataclasses import dataclass, field

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


@dataclass(slots=True)
class StopFilter:
    """Lets text through until a stop string appears; holds back what might become one. Pure."""

    stop: tuple[str, ...]
    held: str = ""
    matched: str = ""
    num_exempt: int = 0
    """Characters of `held` that were made before the reply could stop: a stop string ends the reply if it ends
    after them, even if it begins among them."""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Return the text that can be shown now. After a match (`matched` is set) nothing more is shown.

        Args:
            text: what comes next.
            may_stop: whether a stop string that ends in `text` ends the reply.
        """
        if self.matched:
            return ""
        self.held += text
        if not may_stop:
            self.num_exempt = len(self.held)
        found = [(index, stop) for stop in self.stop if (index := self._find(stop)) >= 0]
        if found:
            index, self.matched = min(found, key=lambda item: (item[0], -len(item[1])))
            shown, self.held = self.held[:index], ""
            return shown
        keep = self._num_undecided()
        shown, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        self.num_exempt = max(0, self.num_exempt - len(shown))
        return shown

    def finish(self) -> str:
        """Return what was held back: the reply is over, so it is no stop string."""
        shown, self.held = self.held, ""
        return shown

    def _find(self, stop: str) -> int:
        return self.held.find(stop, max(0, self.num_exempt - len(stop) + 1))

    def _num_undecided(self) -> int:
        """Length of the longest end of `held` that is a beginning of a stop string."""
        longest = max((len(stop) for stop in self.stop), default=0)
        for length in range(min(longest - 1, len(self.held)), 0, -1):
            if any(stop.startswith(self.held[-length:]) for stop in self.stop):
                return length
        return 0


@dataclass(slots=True)
class ReplyText:
    """Detokenises one reply as it is made.

    The pieces joined equal the tokenizer's `decode` of all shown tokens (special tokens skipped), cut before the
    first stop string. Bytes of an unfinished character are held until it is whole or the reply ends.
    """

    tokenizer: Tokenizer
    stop: tuple[str, ...]
    _ids: list[int] = field(default_factory=list)
    _num_decoded: int = 0
    """Characters that came out of the decoder so far."""
    _stream: DecodeStream = field(default_factory=lambda: DecodeStream(skip_special_tokens=True))
    _filter: StopFilter = field(init=False)

    def __post_init__(self) -> None:
        self._filter = StopFilter(self.stop)

    @property
    def stop_string(self) -> str:
        """The stop string that ended the reply; empty while there is none."""
        return self._filter.matched

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Take in one token that is to be shown; return the text that became certain.

        Without `may_stop` (a reply not longer than min_tokens) a stop string that this token completes is text like
        any other; one that a later token completes ends the reply even if it begins here.
        """
        self._ids.append(token)
        piece = self._stream.step(self.tokenizer, token)
        if piece is None:
            return ""
        self._num_decoded += len(piece)
        return self._filter.push(piece, may_stop=may_stop)

    def finish(self, *, may_stop: bool = True) -> str:
        """Return the rest: bytes that never became a character (as U+FFFD) and text held back for a stop string."""
        if self._filter.matched:
            return ""
        whole = self.tokenizer.decode(self._ids, skip_special_tokens=True)
        shown = self._filter.push(whole[self._num_decoded :], may_stop=may_stop)
        return shown if self._filter.matched else shown + self._filter.finish()

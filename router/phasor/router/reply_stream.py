"""What a client is sent of what its decode worker made: the prompt first if asked for, then the replies, or the best.

Pure: messages in, messages out.
"""

from dataclasses import dataclass, field

from phasor.core.request import ChoiceEnd, FinishedReply
from phasor.router.validation import ReplyShape
from phasor.v1 import inference_pb2 as pb
from phasor.v1 import worker_pb2
from phasor.wire import convert


@dataclass(slots=True, kw_only=True)
class ReplyStream:
    """The client's side of one request.

    Args:
        request_id: goes into every message.
        shape: what the client asked to see.
        prompt_text: the prompt as text.
        token_ids: the prompt as ids.
        num_choices: replies that are made; when more than are shown, nothing is shown before all are complete.
    """

    request_id: str
    shape: ReplyShape
    prompt_text: str
    token_ids: tuple[int, ...]
    num_choices: int
    _began: bool = False
    _held: list[pb.Delta] = field(default_factory=list)
    _scores: dict[int, float] = field(default_factory=dict)

    def push(self, event: worker_pb2.DecodeEvent) -> list[pb.GenerateResponse]:
        """Take in a Delta of the decode worker; return what can be sent now."""
        responses = [] if self._began else self._prompt(event)
        self._began = True
        delta = event.delta
        if not self._chooses:
            return [*responses, pb.GenerateResponse(request_id=self.request_id, delta=delta)]
        score = sum(one.logprob for one in delta.logprobs)
        self._scores[delta.index] = self._scores.get(delta.index, 0.0) + score
        if not self.shape.logprobs:
            del delta.logprobs[:]
        self._held.append(delta)
        return responses

    def finish(
        self, reply: FinishedReply, prefill_incarnation: str, decode_incarnation: str
    ) -> list[pb.GenerateResponse]:
        """Return the last messages: held replies, the best first, and Finished."""
        order = self._best(reply.choices)
        responses = []
        for delta in self._held:
            if delta.index in order:
                delta.index = order.index(delta.index)
                responses.append(pb.GenerateResponse(request_id=self.request_id, delta=delta))
        by_index = {end.index: end for end in reply.choices}
        choices = [convert.choice_end_to_pb(by_index[index]) for index in order]
        for index, choice in enumerate(choices):
            choice.index = index
        finished = pb.Finished(
            finish_reason=choices[0].finish_reason,
            stop_string=choices[0].stop_string,
            usage=convert.usage_to_pb(reply.usage),
            timing=convert.timing_to_pb(reply.timing),
            rope_tier=reply.rope_tier,
            prefill_worker=prefill_incarnation,
            decode_worker=decode_incarnation,
            choices=choices,
        )
        return [*responses, pb.GenerateResponse(request_id=self.request_id, finished=finished)]

    @property
    def _chooses(self) -> bool:
        return self.num_choices > self.shape.num_returned

    def _best(self, ends: tuple[ChoiceEnd, ...]) -> list[int]:
        """Return the indices of the replies that are shown, the highest mean log-probability first."""
        if not self._chooses:
            return [end.index for end in ends]
        means = {end.index: self._scores[end.index] / end.completion_tokens for end in ends}
        return sorted(means, key=lambda index: (-means[index], index))[: self.shape.num_returned]

    def _prompt(self, event: worker_pb2.DecodeEvent) -> list[pb.GenerateResponse]:
        if not (self.shape.echo or self.shape.prompt_logprobs):
            return []
        prompt = pb.Prompt(text=self.prompt_text if self.shape.echo else "", token_ids=self.token_ids)
        if self.shape.prompt_logprobs:
            # A prompt of one token has nothing to score.
            prompt.logprobs.extend(event.prompt_logprobs or [pb.TokenLogprobs()])
        return [pb.GenerateResponse(request_id=self.request_id, prompt=prompt)]

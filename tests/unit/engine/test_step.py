"""The step's budgets."""

from phasor.core.ids import BlockKey, RequestId
from phasor.core.request import SamplingParams
from phasor.engine.sequence import Sequence
from phasor.engine.step import MAX_SCORED_TOKENS, StepBudget


def sequence(name: str, num_tokens: int, prompt_logprobs: int | None = None) -> Sequence:
    return Sequence(
        request_id=RequestId(name),
        token_ids=list(range(num_tokens)),
        num_prompt=num_tokens,
        sampling=SamplingParams(prompt_logprobs=prompt_logprobs),
        tier=1.0,
        arrival=1,
        namespace=BlockKey(bytes(32)),
    )


def test_the_token_budget_is_spent_in_order() -> None:
    budget = StepBudget(10)
    assert budget.add(sequence("a", 4)) and budget.add(sequence("b", 9)) and not budget.add(sequence("c", 1))
    assert [(c.seq.request_id, c.num_tokens, c.samples) for c in budget.chunks] == [
        ("a", 4, True),
        ("b", 6, False),
    ]


def test_prompts_that_are_scored_share_a_bound_and_hold_up_nobody_else() -> None:
    budget = StepBudget(10 * MAX_SCORED_TOKENS)
    for seq in (
        sequence("a", 200, prompt_logprobs=0),
        sequence("b", 2000, prompt_logprobs=5),
        sequence("c", 300, prompt_logprobs=1),
        sequence("d", 300),
    ):
        assert budget.add(seq)
    scheduled = {chunk.seq.request_id: chunk.num_tokens for chunk in budget.chunks}
    assert scheduled == {"a": 200, "b": MAX_SCORED_TOKENS - 200, "d": 300}

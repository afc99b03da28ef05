"""Penalties, bias and min_tokens against transformers' own processors and loops in float64."""

import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from phasor.core.request import SamplingParams
from phasor.engine.logit_rules import TokenDraw, rules_applied
from phasor.engine.sampling import sample

VOCAB = 97
EOS = frozenset({5, 6})


def make_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(num_rows)) * 3


def make_tokens(row: int, length: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(row)).tolist()


def with_rules(logits: torch.Tensor, draws: list[TokenDraw]) -> torch.Tensor:
    """The logits that tokens are chosen from; checks that the model's own are put back, to the bit."""
    before = logits.clone()
    with rules_applied(logits, draws, EOS):
        found = logits.clone()
    assert torch.equal(logits, before), "the model's own logits are lost"
    return found


def test_without_rules_nothing_changes() -> None:
    logits = make_logits(2)
    draws = [TokenDraw(SamplingParams(), make_tokens(i, 9), 4) for i in range(2)]
    assert torch.equal(with_rules(logits, draws), logits)


def test_what_several_rules_change_is_put_back_even_when_choosing_fails() -> None:
    params = SamplingParams(
        repetition_penalty=1.7, presence_penalty=0.3, logit_bias=((3, 1.0), (5, 2.0)), min_tokens=9
    )
    logits, draws = make_logits(1), [TokenDraw(params, [3, 5, 3, 5], 2)]
    assert not torch.equal(with_rules(logits, draws), logits)
    before = logits.clone()
    with pytest.raises(ZeroDivisionError), rules_applied(logits, draws, EOS):
        raise ZeroDivisionError
    assert torch.equal(logits, before)


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_is_transformers_own(penalty: float) -> None:
    logits = make_logits(3)
    draws = [
        TokenDraw(SamplingParams(repetition_penalty=penalty), make_tokens(0, 30), 10),
        TokenDraw(SamplingParams(), make_tokens(1, 30), 10),
        TokenDraw(SamplingParams(repetition_penalty=penalty), make_tokens(2, 3), 3),
    ]
    found = with_rules(logits, draws)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for row in (0, 2):
        want = processor(torch.tensor([list(draws[row].token_ids)]), logits[row : row + 1].clone())
        assert torch.equal(found[row : row + 1], want)
    assert torch.equal(found[1], logits[1])


def test_presence_and_frequency_count_the_reply_only() -> None:
    logits = make_logits(2)
    tokens = [3, 3, 9, 9, 9, 20]
    draws = [
        TokenDraw(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), tokens, 2),
        TokenDraw(SamplingParams(presence_penalty=-1.0), tokens, 6),
    ]
    found = with_rules(logits, draws)
    want = logits.clone()
    want[0, 9] -= 0.5 + 0.25 * 3
    want[0, 20] -= 0.5 + 0.25
    torch.testing.assert_close(found, want)


def test_bias_is_added_after_the_penalties() -> None:
    logits = make_logits(1)
    params = SamplingParams(repetition_penalty=2.0, logit_bias=((9, 7.5), (11, -100.0)))
    found = with_rules(logits, [TokenDraw(params, [9], 1)])
    old = float(logits[0, 9])
    assert float(found[0, 9]) == pytest.approx((old / 2 if old > 0 else old * 2) + 7.5)
    assert float(found[0, 11]) == pytest.approx(float(logits[0, 11]) - 100)


@pytest.mark.parametrize("num_generated", [0, 2, 3])
def test_min_tokens_is_transformers_own(num_generated: int) -> None:
    logits = make_logits(1)
    params = SamplingParams(min_tokens=3, stop_token_ids=(8,))
    tokens = make_tokens(0, 4 + num_generated)
    found = with_rules(logits, [TokenDraw(params, tokens, 4)])
    processor = MinNewTokensLengthLogitsProcessor(4, 3, [5, 6, 8])
    assert torch.equal(found, processor(torch.tensor([tokens]), logits.clone()))


def test_rules_decide_the_token_and_log_probabilities_stay_the_models_own() -> None:
    logits = make_logits(1)
    params = SamplingParams(temperature=0.0, logit_bias=((40, 100.0),), logprobs=2)
    (token,) = sample(logits, [TokenDraw(params, [1], 1)], EOS)
    assert token.token_id == 40 and token.logprobs is not None
    want = logits[0].double().log_softmax(-1)
    assert token.logprobs.logprob == pytest.approx(float(want[40]), abs=1e-5)
    assert [t for t, _ in token.logprobs.top] == want.topk(2).indices.tolist()
    assert [v for _, v in token.logprobs.top] == pytest.approx(want.topk(2).values.tolist(), abs=1e-5)

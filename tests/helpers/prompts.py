"""Twenty prompts for token equality: languages, code, emoji; lengths around block and chunk edges."""

from tokenizers import Tokenizer

ENGLISH = (
    "The lighthouse keeper wrote in his journal every evening. He noted the wind, the height of the waves, and the "
    "names of the ships that passed. On the ninth of March he saw nothing at all, and wrote that down as well. "
)
CODE = '''def merge(left, right):
    """Merge two sorted lists."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i]); i += 1
        else:
            result.append(right[j]); j += 1
    return result + left[i:] + right[j:]


'''
CHINESE = "北京是中国的首都,有三千多年的历史。城里有许多古老的宫殿和寺庙,每年吸引数百万游客。"
EMOJI = "Weather report: ☀️ 🌧️ ⛈️ 👩‍👩‍👧 went out, 🏳️‍🌈 waved.  3  degrees,   10 percent.\n"


def equality_prompts(
    tokenizer: Tokenizer, *, block_tokens: int = 16, long_tokens: int = 3000
) -> dict[str, list[int]]:
    """Return named prompts as token ids, from 1 token to `long_tokens`."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def exactly(text: str, count: int) -> list[int]:
        tokens = ids(text)
        return (tokens * (count // len(tokens) + 1))[:count]

    b = block_tokens
    return {
        "one-token": ids("Once")[:1],
        "capital": ids("The capital of France is"),
        "fibonacci": ids("def fibonacci(n):\n    "),
        "chinese": ids(CHINESE),
        "emoji": ids(EMOJI),
        "block-1": exactly(ENGLISH, b - 1),
        "block": exactly(ENGLISH, b),
        "block+1": exactly(ENGLISH, b + 1),
        "2block-1": exactly(CODE, 2 * b - 1),
        "2block": exactly(CODE, 2 * b),
        "2block+1": exactly(CODE, 2 * b + 1),
        "63": exactly(CHINESE + ENGLISH, 63),
        "64": exactly(CHINESE + ENGLISH, 64),
        "65": exactly(CHINESE + ENGLISH, 65),
        "code-200": exactly(CODE, 200),
        "chunk-1": exactly(ENGLISH + CODE, 511),
        "chunk": exactly(ENGLISH + CODE, 512),
        "chunk+1": exactly(ENGLISH + CODE, 513),
        "english-1000": exactly(ENGLISH + EMOJI, 1000),
        "long": exactly(ENGLISH + CODE + CHINESE, long_tokens),
    }

"""The workloads share exactly what they say."""

from __future__ import annotations

from workshop.measure.prefix_workloads import PrefixWorkload


def num_shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))


def test_prompts_share_their_beginning_and_not_a_token_more() -> None:
    """Few-shot prompts are a tree of two levels."""
    workload = PrefixWorkload(64, 0)
    families = [
        (workload.shared_system_prompts(3, 4, 20, 7, 5), [0, 20, 20, 20] * 3),
        (workload.few_shot(3, 2, 10, 20, 5, 1), [0, 30, 10, 30, 10, 30]),
    ]
    for sessions, expected in families:
        prompts = [request.prompt({}) for session in sessions for request in session]
        shared = [
            max((num_shared(prompt, other) for other in prompts[:i]), default=0)
            for i, prompt in enumerate(prompts)
        ]
        assert shared == expected

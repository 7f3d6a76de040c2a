"""The times of one answer in the gateway's metrics."""

import pytest
from jitney import __version__
from jitney_gateway import gateway_metrics as module
from jitney_gateway.gateway_metrics import AnswerTimer, GatewayMetrics
from jitney_gateway.model_steps import Step


def test_a_sequence_without_new_tokens_keeps_the_time_of_its_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    metrics = GatewayMetrics()
    timer = AnswerTimer(metrics, "m", "", streamed=True)
    for at, counts in [(1.0, [0, 0]), (2.0, [1, 1]), (4.0, [1, 0]), (5.0, [1, 1])]:
        now[0] = at
        timer.add_step(
            Step(
                prompt=0,
                texts=["", ""],
                finish_reasons=[None, None],
                num_tokens=counts,
                num_prompt_tokens=1,
                logprobs=None,
                timing={},
            )
        )
    text = metrics.exposition().decode()
    assert 'time_to_first_token_seconds_sum{model="m"} 2.0' in text
    assert 'time_to_first_token_seconds_count{model="m"} 1.0' in text
    assert 'inter_token_seconds_sum{model="m"} 6.0' in text, (
        "2 and 1, and 3 without a token between"
    )
    assert 'inter_token_seconds_count{model="m"} 3.0' in text


def test_an_answer_counts_by_its_lengths() -> None:
    metrics = GatewayMetrics()
    AnswerTimer(metrics, "m", "first", streamed=False).end(prompt_tokens=12, generated_tokens=700)
    text = metrics.exposition().decode()
    for name, below, above, count in (
        ("prompt", "10.0", "20.0", 12),
        ("generated", "500.0", "1000.0", 700),
    ):
        family = f"jitney_gateway_request_{name}_tokens"
        assert f'{family}_bucket{{le="{below}",model="m"}} 0.0' in text
        assert f'{family}_bucket{{le="{above}",model="m"}} 1.0' in text
        assert f'{family}_sum{{model="m"}} {count}.0' in text


def test_a_gateway_tells_what_was_built() -> None:
    text = GatewayMetrics().exposition().decode()
    assert f'jitney_gateway_build_info{{version="{__version__}"}} 1.0' in text

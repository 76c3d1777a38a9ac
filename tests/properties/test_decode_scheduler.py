"""The decode brain's promises, under random loads: everything ends, budgets hold, order is kept.

The simulation checks at every step that the oldest is not preempted, blocks add up, the batch and the step's
prompt tokens stay within their bounds, and reservations within theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.domain.order import PRIORITY_STEP_S
from services.decode.admission import DecodeSettings
from services.decode.messages import Surroundings
from services.decode.scheduler import ALONE_TOKENS
from tests.support.decode_sim import DecodeSim, Prices

EOS = frozenset({256})


@dataclass(frozen=True)
class Ask:
    """A request that comes `turns` turns after the one before."""

    num_prompt: int
    num_output: int
    priority: int
    turns: int


asks = st.lists(
    st.builds(
        Ask,
        num_prompt=st.integers(1, 24) | st.integers(1, 60),
        num_output=st.integers(1, 40),
        priority=st.integers(-3, 3) | st.sampled_from([-(2**31), 2**31 - 1]),
        turns=st.integers(0, 12),
    ),
    min_size=1,
    max_size=14,
)


def _settings(**changes: object) -> DecodeSettings:
    return DecodeSettings(4096, EOS, **{"pool_share": 1.0, **changes})  # type: ignore[arg-type]


def _run(sim: DecodeSim, load: list[Ask], cancels: frozenset[int] = frozenset()) -> None:
    for i, ask in enumerate(load):
        sim.submit(f"r{i}", ask.num_prompt, ask.num_output, ask.priority)
        for _ in range(ask.turns):
            sim.turn()
        if i in cancels:
            sim.cancel(f"r{i // 2}")
    sim.rest()
    for i, ask in enumerate(load):
        finish = sim.finishes[f"r{i}"]
        assert finish.reason in ("length", "abort", "error")
        if finish.reason == "length":
            assert sim.outputs[f"r{i}"] == ask.num_output
        elif finish.failure is not None:
            assert ask.num_prompt + ask.num_output > sim.pools.total_tokens
    sim.assert_empty()


@given(load=asks, num_blocks=st.integers(8, 40), colocated=st.booleans(), max_batch=st.integers(1, 8))
@settings(max_examples=150)
def test_every_request_ends_in_a_pool_that_is_too_small_for_all(
    load: list[Ask], num_blocks: int, colocated: bool, max_batch: int
) -> None:
    sim = DecodeSim(_settings(colocated=colocated, max_batch=max_batch), num_blocks=num_blocks)
    _run(sim, load)
    assert any(finish.reason == "length" for finish in sim.finishes.values()) or all(
        ask.num_prompt + ask.num_output > 4 * num_blocks for ask in load
    )


@given(
    load=asks,
    num_blocks=st.integers(8, 40),
    num_prefills=st.integers(1, 3),
    reserve_share=st.sampled_from([0.2, 0.5, 1.0]),
    cancels=st.frozensets(st.integers(0, 13), max_size=4),
)
@settings(max_examples=150)
def test_every_request_ends_with_hand_offs_among_them(
    load: list[Ask], num_blocks: int, num_prefills: int, reserve_share: float, cancels: frozenset[int]
) -> None:
    sim = DecodeSim(
        _settings(threshold_tokens=10, reserve_share=reserve_share, max_batch=6),
        num_blocks=num_blocks,
        num_prefills=num_prefills,
    )
    _run(sim, load, cancels)


def test_lower_priority_numbers_start_sooner() -> None:
    sim = DecodeSim(_settings(colocated=True, max_batch=1), num_blocks=64)
    for name, priority in (("a", 0), ("late", 5), ("b", 0), ("soon", -1)):
        sim.submit(name, 8, 4, priority)
    sim.rest()
    assert sim.started == ["soon", "a", "b", "late"]


def test_nobody_starves_under_a_stream_of_better_priority() -> None:
    """The worker is always full of requests of priority 0; one of priority 3 waits for 30 s, no longer."""
    sim = DecodeSim(_settings(colocated=True, max_batch=2), num_blocks=64)
    for name in ("first", "second"):
        sim.submit(name, 8, 40)
    sim.turn()
    sim.submit("patient", 8, 4, 3)
    for i in range(4000):
        if sim.brain.num_waiting < 4:
            sim.submit(f"r{i}", 8, 40)
        sim.turn()
        if "patient" in sim.finishes:
            break
    assert 3 * PRIORITY_STEP_S <= sim.now <= 3 * PRIORITY_STEP_S + 2.0


def test_a_running_request_of_low_priority_keeps_its_blocks_while_it_is_the_oldest() -> None:
    sim = DecodeSim(_settings(colocated=True), num_blocks=10)
    sim.submit("old", 10, 26, 100)
    for _ in range(3):
        sim.turn()
    for name in ("new", "newer"):
        sim.submit(name, 6, 20, -100)
    sim.rest()
    assert sim.finishes["old"].trail.num_preempted == 0
    assert sim.finishes["new"].trail.num_preempted + sim.finishes["newer"].trail.num_preempted > 0


def test_of_two_others_the_one_of_lower_priority_gives_way() -> None:
    sim = DecodeSim(_settings(colocated=True), num_blocks=20)
    sim.submit("old", 8, 60)
    sim.turn()
    sim.submit("unimportant", 8, 20, 1)
    sim.submit("important", 8, 20, 0)
    sim.rest()
    assert sim.finishes["important"].trail.num_preempted == 0
    assert sim.finishes["unimportant"].trail.num_preempted > 0


@given(
    num_decodes=st.integers(1, 8),
    prompts=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    token_us=st.sampled_from([50, 300, 1000]),
    slack=st.sampled_from([0.1, 0.25, 0.5]),
)
@settings(max_examples=30)
def test_local_prefill_keeps_the_itl_budget(
    num_decodes: int, prompts: list[int], token_us: int, slack: float
) -> None:
    """Mean time between tokens of the steps that decode: at most the slack longer than without prompts."""
    prices = Prices(prompt_token_s=token_us / 1e6)
    sim = DecodeSim(_settings(itl_slack=slack), num_blocks=1000, prices=prices)
    for i in range(num_decodes):
        sim.submit(f"d{i}", 4, 400)
    while len(sim.started) < num_decodes:
        sim.turn()
    sim.turn()
    sim.steps.clear()
    for i, size in enumerate(prompts):
        sim.submit(f"p{i}", size, 1)
        for _ in range(20):
            sim.turn()
    beside = [step for step in sim.steps if step.num_decodes]
    spent = sum(step.elapsed_s - prices.decode_step_s for step in beside)
    assert spent <= slack * len(beside) * prices.decode_step_s + 2 * 4 * prices.prompt_token_s
    sim.rest()
    assert len(sim.finishes) == num_decodes + len(prompts)


def test_both_prefills_at_full_width_beside_decodes() -> None:
    """`--role both` is the baseline: chunks of 256 in mixed batches, whatever that does to the others."""
    sim = DecodeSim(_settings(colocated=True), num_blocks=1000)
    sim.submit("decode", 4, 100)
    sim.turn()
    sim.submit("prompt", 600, 1)
    for _ in range(3):
        sim.turn()
    assert [step.names for step in sim.steps[1:]] == [
        {"decode": 1, "prompt": 256},
        {"decode": 1, "prompt": 256},
        {"decode": 1, "prompt": 88},
    ]
    sim.rest()


def test_a_short_prompt_is_not_behind_a_long_one() -> None:
    sim = DecodeSim(_settings(colocated=True), num_blocks=2000)
    sim.submit("long", 4000, 1)
    sim.turn()
    sim.submit("short", 20, 1)
    sim.turn()
    sim.turn()
    assert sim.started == ["short"]
    sim.rest()
    assert len(sim.steps) == -(-4020 // ALONE_TOKENS)


def test_waiting_for_kv_takes_no_more_than_its_share_of_the_pool() -> None:
    """20 prompts of 40 tokens, 200 positions, a share of 100: two at a time, and a short one passes."""
    sim = DecodeSim(_settings(threshold_tokens=10), num_blocks=50, num_prefills=1)
    for i in range(20):
        sim.submit(f"long{i}", 40, 2)
    sim.turn()
    assert len(sim.jobs) == 2
    sim.submit("short", 8, 1)
    sim.turn()
    sim.turn()
    assert sim.started == ["short"]
    sim.rest()
    assert [name for name in sim.started if name != "short"] == [f"long{i}" for i in range(20)]


def test_a_small_hand_off_does_not_pass_a_large_one_that_waits_for_room() -> None:
    sim = DecodeSim(_settings(threshold_tokens=10), num_blocks=50, num_prefills=1)
    for name, size in (("a", 40), ("b", 40), ("large", 150), ("small", 12), ("smaller", 11)):
        sim.submit(name, size, 2)
    sim.rest()
    assert sim.started == ["a", "b", "large", "small", "smaller"]


def test_one_that_awaits_its_kv_gives_way_to_an_older_one_that_runs() -> None:
    sim = DecodeSim(_settings(threshold_tokens=10, reserve_share=1.0), num_blocks=12, num_prefills=1)
    sim.prefills[0].due.append((5.0, None))  # type: ignore[arg-type]  # it is busy
    sim.submit("old", 8, 30)
    sim.turn()
    sim.submit("young", 30, 4)
    for _ in range(25):
        sim.turn()
    assert sim.outputs["old"] == 26
    assert sim.brain.counters["preempted"] == 1
    assert not sim.jobs
    sim.prefills[0].due.clear()
    sim.rest()
    assert sim.finishes["young"].trail.num_preempted == 1
    assert sim.finishes["old"].trail.num_preempted == 0


def test_a_short_prompt_goes_where_it_is_faster() -> None:
    """Beside a decode, 60 tokens have a fifth of each step: 0.3 s. By way of a prefill worker it is 40 ms."""
    sim = DecodeSim(_settings(threshold_tokens=100), num_blocks=1000, num_prefills=1)
    sim.submit("idle", 60, 1)
    sim.rest()
    assert sim.finishes["idle"].trail.path_reason == "short_prompt"
    sim.submit("decode", 4, 2000)
    for _ in range(3):
        sim.turn()
    sim.submit("unknown", 60, 1)
    while "unknown" not in sim.finishes:
        sim.turn()
    assert sim.finishes["unknown"].trail.path_reason == "short_prompt"
    sim.submit("long", 150, 1)
    while "long" not in sim.finishes:
        sim.turn()
    sim.submit("busy", 60, 1)
    while "busy" not in sim.finishes:
        sim.turn()
    trail = sim.finishes["busy"].trail
    assert (trail.path, trail.path_reason, trail.fallbacks) == ("disaggregated", "decode_busy", {})
    assert trail.ttft_s < sim.finishes["unknown"].trail.ttft_s / 4
    sim.brain.surroundings(Surroundings(0, True))
    sim.submit("alone", 60, 1)
    while "alone" not in sim.finishes:
        sim.turn()
    assert sim.finishes["alone"].trail.path_reason == "short_prompt"
    sim.cancel("decode")
    sim.rest()

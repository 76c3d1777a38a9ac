"""The engine's benchmark: drivers on the toy model through real processes, claims, limits and profiles."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from bench import engine, llama_cpp, subjects
from bench.driver import Driver
from bench.engine_limits import Limits, model_cost
from bench.harness import Options, Report
from bench.llama_cpp import LlamaCpp
from bench.peers import Peer
from bench.recipes import Place
from bench.serve import Pace, prompt
from bench.stats import NotRun, Samples
from bench.step_profile import Profiler, group_of
from tests.support.tiny_llama import write_config

TOY_BARE = (sys.executable, "-m", "bench.drivers.bare", "toy", "1", "256")
TOY_WORKER = (sys.executable, "-m", "bench.drivers.worker", "toy", "1", "256", "8", "bf16")


def spoken(code: str) -> Driver:
    return Driver("toy", [sys.executable, "-c", code], {})


def test_the_bare_step_is_measured_in_its_own_process() -> None:
    with closing(Driver("bare", TOY_BARE, {})) as driver:
        assert driver.call("prefill", num_tokens=600)["num_tokens"] == 600
        found = driver.call("decode", batch=4, context=64, num_steps=5, scattered=True)
        assert found["num_tokens"] == 20
        assert found["seconds"] > 0.0


def test_ours_is_measured_through_the_workers_engine_process() -> None:
    with closing(Driver("worker", TOY_WORKER, {})) as driver:
        assert driver.call("prefill", num_tokens=300)["num_tokens"] == 300
        for _ in range(2):  # the second time all prompts are in the prefix cache
            found = driver.call("decode", batch=8, context=64, num_steps=10)
            assert found["num_tokens"] == 80
            assert found["seconds"] > 0.0
        with pytest.raises(NotRun, match="context has"):
            driver.call("prefill", num_tokens=9000)


def test_a_driver_that_can_not_open_its_subject_says_why() -> None:
    command = [sys.executable, "-m", "bench.drivers.bare", "/no/such/model", "1", "8"]
    with pytest.raises(NotRun, match=r"bare: Unsupported: /no/such/model"):
        Driver("bare", command, {})


def test_a_driver_that_dies_leaves_its_last_words() -> None:
    with pytest.raises(NotRun, match="toy is gone: KeyError: 'model'"):
        spoken("{}['model']")


def test_what_a_library_prints_is_no_answer() -> None:
    code = "from bench.serve import serve; serve(lambda: ({}, {'add': lambda a: [print('noise'), a + 1][1]}))"
    with closing(spoken(code)) as driver:
        assert driver.call("add", a=1) == 2
        with pytest.raises(NotRun, match="TypeError"):
            driver.call("add", a="x")
        assert driver.call("add", a=2) == 3


def test_prompts_are_reproducible_and_share_no_prefix() -> None:
    assert prompt(3, 50) == prompt(3, 60)[:50]
    assert len({prompt(seed, 1)[0] for seed in range(200)}) > 190
    assert all(64 <= token < 257 for token in prompt(1, 500, 257))


def test_pace_counts_only_while_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr("bench.serve.time.perf_counter", lambda: float(next(now)))
    pace = Pace(2, num_warm=2, num_steps=3)
    pace.saw([(0, 2)])
    pace.saw([(0, 1), (1, 2)])  # begins at 1: both have two
    for _ in range(2):
        pace.saw([(0, 1), (1, 1)])
    assert pace.done
    assert (pace.seconds, pace.num_tokens) == (2.0, 4)
    pace.saw([(1, 1)])
    assert pace.num_tokens == 4


def test_step_times_are_rates_turned_over() -> None:
    assert engine.step_times(Samples({"a": [800.0]}), 8).values == {"a": [10.0]}


def test_operators_fall_into_groups() -> None:
    assert group_of("mkldnn::_linear_pointwise") == "linear"
    assert group_of("aten::_scaled_dot_product_flash_attention_for_cpu") == "attention"
    assert group_of("aten::index_select") == "gather and scatter"
    assert group_of("aten::silu") == "other operators"


def test_a_profile_adds_up_to_its_step() -> None:
    import torch

    weight = torch.ones(256, 256)
    found = Profiler(lambda: torch.nn.functional.linear(weight, weight)).profile(5)
    parts = dict(found["parts"])  # type: ignore[call-overload]
    assert parts["torch: linear"] > 0.0
    assert list(parts.values()) == sorted(parts.values(), reverse=True)


def test_the_models_cost_is_counted_from_its_shapes(tmp_path: Path) -> None:
    cost = model_cost(str(write_config(tmp_path)))
    layer = 48 * (6 + 2 + 2) * 8 + 6 * 8 * 48 + 3 * 48 * 80 + 2 * 48
    assert cost.num_head_weights == 320 * 48
    assert cost.num_weights == 3 * layer + 48 + 320 * 48
    assert cost.kv_bytes_per_token == 2 * 3 * 2 * 8 * 2
    assert cost.decode_bytes(2, 100) == 2 * cost.num_weights + 200 * cost.kv_bytes_per_token
    usage = cost.decode_usage("x", 2, 100, [200.0], Limits(cost.decode_bytes(2, 100) * 200, 1e12))
    assert usage[1] == 10.0
    assert usage[3] == "50%"
    assert cost.decode_usage("x", 2, 100, [], Limits(1.0, 1.0))[1] == "–"


class FakeSubject:
    def __init__(self, rate: float) -> None:
        self._rate = rate

    def prefill(self, num_tokens: int) -> float:
        return self._rate

    def decode(self, batch: int, context: int, num_steps: int) -> float:
        return self._rate * batch

    def close(self) -> None:
        pass


RATES = {engine.OURS: 120.0, engine.OURS_AUTO: 300.0, engine.BARE: 125.0, engine.VLLM: 100.0}


def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **options: object) -> Report:
    @contextmanager
    def opened(_: str, __: int, names: list[str], ___: Console) -> Iterator[dict[str, object]]:
        missing = subjects.Missing("llama.cpp is not built: make peers")
        yield {name: FakeSubject(RATES[name]) if name in RATES else missing for name in names}

    directory = str(write_config(tmp_path))
    monkeypatch.setattr(subjects, "opened", opened)
    monkeypatch.setattr(subjects, "model_directory", lambda: directory)
    monkeypatch.setattr(engine, "measured_limits", lambda _: Limits(1e9, 1e9))
    return engine.measure(Options(quick=True, threads=(2,), **options), Console(quiet=True))  # type: ignore[arg-type]


def test_every_case_is_set_beside_every_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = measured(monkeypatch, tmp_path)
    met = {(row.name, row.reference_name): row.met for row in report.rows}
    assert met["prefill 512, 2T", engine.VLLM] is True
    assert met["decode B1 at 256, 2T", engine.VLLM] is True
    assert met["decode B1 at 256, 2T", "llama.cpp BF16"] is False
    assert met["decode B16 at 256, 2T", "llama.cpp BF16"] is None
    assert met["decode B1 at 256, 2T, 4-bit layers", engine.VLLM] is True
    assert ("decode B16 at 256, 2T, 4-bit layers", engine.VLLM) not in met
    assert met["loop, B16 at 256, 2T", engine.BARE] is True
    loop = next(row for row in report.rows if row.name == "loop, B1 at 256, 2T")
    assert loop.ratio == pytest.approx(125 / 120)
    not_run = [row.why for row in report.rows if row.why]
    assert not_run == ["not run: llama.cpp is not built: make peers"] * 4


def test_only_what_is_asked_for_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = measured(monkeypatch, tmp_path, only="prefill")
    assert {row.name for row in report.rows} == {"prefill 512, 2T"}


def test_a_subject_that_is_missing_does_not_keep_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))
    with subjects.opened("toy", 1, [engine.VLLM], Console(quiet=True)) as opened:
        with pytest.raises(NotRun, match="vllm is not built: make peers"):
            opened[engine.VLLM].decode(1, 1, 1)


def test_workers_get_what_the_launcher_gives_them() -> None:
    found = subjects.engine_environment("toy", 2)
    assert (found["OMP_NUM_THREADS"], found["GOMP_SPINCOUNT"]) == ("2", "20000")
    assert not any(name.startswith("DIPTYCH") for name in found)


@pytest.fixture
def fake_llama(tmp_path: Path) -> Callable[[str, str], LlamaCpp]:
    """llama.cpp whose program `tool` runs a shell script."""

    def make(tool: str, script: str) -> LlamaCpp:
        place = Place(tmp_path)
        folder = tmp_path / "build/bin"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / tool).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (folder / tool).chmod(0o755)
        return LlamaCpp(Peer("llama.cpp", place, "b1"), tmp_path / "m.gguf", 2)

    return make


def test_llama_bench_gives_prompts_and_single_sequences(fake_llama: Callable[[str, str], LlamaCpp]) -> None:
    subject = fake_llama(
        "llama-bench",
        """case "$*" in *"-t 2"*"-d 256"*) r=150;; *"-p 512 -n 0") r=900;; esac
echo "[{\\"avg_ts\\": $r}]" """,
    )
    assert subject.prefill(512) == 900.0
    assert subject.decode(1, 256, 16) == 150.0


def test_llama_batched_bench_gives_batches(fake_llama: Callable[[str, str], LlamaCpp]) -> None:
    script = """case "$*" in *"-npp 256 -ntg 16 -npl 8"*) echo main; echo '{"speed_tg": 400.5}';; esac"""
    assert fake_llama("llama-batched-bench", script).decode(8, 256, 16) == 400.5
    silent = fake_llama("llama-batched-bench", "echo nothing")
    with pytest.raises(NotRun, match="no figure"):
        silent.decode(8, 256, 16)


def test_a_llama_that_fails_says_why(fake_llama: Callable[[str, str], LlamaCpp]) -> None:
    subject = fake_llama("llama-bench", "echo 'error: no model' >&2; exit 4")
    with pytest.raises(NotRun, match="llama-bench ended with 4: error: no model"):
        subject.prefill(512)


def test_a_format_is_made_once(fake_llama: Callable[[str, str], LlamaCpp], tmp_path: Path) -> None:
    shipped = tmp_path / "m.gguf"
    peer = fake_llama("llama-quantize", f'echo x >> {tmp_path}/runs; cp "$2" "$3"').peer
    shipped.write_text("weights", encoding="utf-8")
    assert llama_cpp.model_file(peer, shipped, "Q4_1") == shipped
    for _ in range(2):
        assert llama_cpp.model_file(peer, shipped, "BF16").read_text(encoding="utf-8") == "weights"
    assert (tmp_path / "runs").read_text(encoding="utf-8") == "x\n"

"""`diptych demo`, from nothing running to the proof that the KV crossed, with the toy and the real model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.running_up import run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.mark.parametrize("model", ["toy", pytest.param("smollm2-135m", marks=pytest.mark.engine)])
def test_the_demo_shows_a_kv_that_crossed(tmp_path: Path, model: str) -> None:
    done = run(tmp_path, "demo", "--model", model)

    assert done.returncode == 0, done.stderr
    proof = re.search(
        r"The KV really crossed: (\d+) bytes in (\d+) chunks, from (\S+) to (\S+); (.*)\.", done.stdout
    )
    assert proof is not None, done.stdout
    assert int(proof[1]) > 0
    assert int(proof[2]) >= 2
    assert (proof[3], proof[4], proof[5]) == ("prefill-0", "decode-0", "local prefill: 0 tokens")
    for row in ("queue", "prefill", "hand-off", "decode", "TTFT", "TPOT"):
        assert re.search(rf"^│ {row} ", done.stdout, re.MULTILINE), done.stdout


def test_a_demo_of_no_model_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "demo", "--model", str(tmp_path / "none.gguf"))
    assert done.returncode == 1
    assert "none.gguf: no such file" in done.stderr

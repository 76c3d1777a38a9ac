"""Figures into a page: tables are the benchmark's own rows; only what is between the markers moves."""

from pathlib import Path

import pytest
from rich.console import Console

from bench import page
from bench.harness import Claim, Options, Report, Sheet, row_of, run
from bench.stats import Samples

SAMPLES = Samples({"ours": [120.0], "vLLM": [100.0]}, {"llama.cpp": "not built"})
TEXT = "# A page\n\n<!-- figures: toy -->\nold\n<!-- end of figures -->\n\nbelow\n"


@pytest.fixture
def figures(tmp_path: Path) -> Path:
    """The JSON of a run."""
    claims = [
        Claim("decode B1", "tok/s", "ours", "vLLM", aim=1.1, stretch=1.3),
        Claim("decode B1", "tok/s", "ours", "llama.cpp", aim=0.9),
    ]
    report = Report(
        [row_of(claim, SAMPLES) for claim in claims],
        [Sheet("profile", ("part", "ms"), [("linear", 7.256)], "two profilers")],
        ["a note"],
    )
    file = tmp_path / "toy.json"
    run({"toy": lambda *_: report}, Options(json=file), Console(quiet=True))
    return file


def test_figures_replace_what_was_there(figures: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.md"
    target.write_text(TEXT, encoding="utf-8")
    for _ in range(2):  # the markers survive, so that it can be done again
        assert page.main([str(target), f"toy={figures}"]) == 0
    said = target.read_text(encoding="utf-8")
    assert said.startswith("# A page\n\n<!-- figures: toy -->\nMeasured on ")
    assert said.endswith("<!-- end of figures -->\n\nbelow\n")
    assert "old" not in said
    assert "| decode B1 | vLLM | 1.20 (1.20–1.20) | ≥ 1.1 (1.3) | yes |" in said
    assert "| decode B1 | llama.cpp | not run: not built | ≥ 0.9 | **no** |" in said
    assert "| tok/s | ours | vLLM | llama.cpp |" in said
    assert "| decode B1 | 120 | 100 | – |" in said
    assert "| linear | 7.26 |" in said


def test_a_page_without_the_markers_is_left_alone(
    figures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "page.md"
    target.write_text("nothing\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        page.main([str(target), f"toy={figures}"])
    assert "no <!-- figures: toy -->" in capsys.readouterr().err
    assert target.read_text(encoding="utf-8") == "nothing\n"

"""Building peers: steps are taken up where a killed build left them, and failures say why."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from bench import peers
from bench.peers import BuildFailed, build, find_peer
from bench.recipes import RECIPES, Place, Recipe, Step, wanted_requirements

METADATA = """Metadata-Version: 2.4
Name: a-peer
Requires-Dist: numpy
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchaudio
Requires-Dist: Torch_Vision; extra == "video"
Requires-Dist: setuptools<81; python_version < "3"
Requires-Dist: fastapi[standard]>=0.133.0; python_version > "3"
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))
    return tmp_path / "peers"


def python(code: str) -> Callable[[Place], list[str]]:
    return lambda place: [sys.executable, "-c", code.replace("HERE", str(place.root))]


def built(recipe: Recipe) -> peers.Peer:
    with Progress(console=Console(quiet=True)) as progress:
        return build(recipe, progress)


def counting(name: str = "toy", code: str = "", probe: str = "print('log line'); print('1.2')") -> Recipe:
    count = "open('HERE/count', 'a').write('x');" + code
    return Recipe(name, "a toy", (Step("count", python(count)),), python(probe))


def test_a_built_peer_is_found_with_its_version(cache: Path) -> None:
    assert find_peer("toy").missing == "toy is not built: make peers"
    peer = built(counting())
    assert (peer.version, peer.missing) == ("1.2", "")
    assert find_peer("toy") == peer
    assert "log line" in (cache / "toy" / "build.log").read_text(encoding="utf-8")


def test_a_step_that_is_done_is_not_done_again(cache: Path) -> None:
    built(counting())
    built(counting())
    assert (cache / "toy" / "count").read_text(encoding="utf-8") == "x"


def test_a_changed_step_is_done_again(cache: Path) -> None:
    built(counting())
    built(counting(code="pass"))
    assert (cache / "toy" / "count").read_text(encoding="utf-8") == "xx"


def test_a_build_goes_on_after_the_step_that_failed(cache: Path) -> None:
    first = counting().steps[0]
    broken = Step("compile", python("import sys; print('fatal error: no header'); sys.exit(3)"))
    probe = python("print('1')")
    with pytest.raises(BuildFailed, match="compile ended with 3: fatal error: no header"):
        built(Recipe("toy", "a toy", (first, broken), probe))
    assert find_peer("toy").missing
    mended = Step("compile", python("pass"))
    assert built(Recipe("toy", "a toy", (first, mended), probe)).version == "1"
    assert (cache / "toy" / "count").read_text(encoding="utf-8") == "x"


def test_a_peer_whose_probe_fails_is_not_there() -> None:
    with pytest.raises(BuildFailed, match="probe ended with 1"):
        built(counting(probe="import no_such_module"))
    assert find_peer("toy").missing


def test_only_one_builds_at_a_time(cache: Path) -> None:
    (cache / "toy").mkdir(parents=True)
    with peers._only_builder(Place(cache / "toy")), pytest.raises(BuildFailed, match="under way"):
        built(counting())


def test_main_says_what_failed_and_builds_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "RECIPES", (counting("bad", probe="import nothing_here"), counting("good")))
    assert peers.main([]) == 1
    said = capsys.readouterr().out
    assert "bad: not built: probe ended with 1" in said
    assert "good 1.2" in said
    assert (
        json.loads((peers.peers_dir() / "good" / "peer.json").read_text(encoding="utf-8"))["name"] == "good"
    )
    assert peers.main(["good"]) == 0


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(SystemExit):
        peers.main(["nobody"])


def test_requirements_leave_out_what_is_unwanted_and_what_is_for_others() -> None:
    assert wanted_requirements(METADATA) == ["numpy", "fastapi[standard]>=0.133.0"]


def test_recipes_are_pinned(tmp_path: Path) -> None:
    """What a step installs from an index has an exact version."""
    for recipe in RECIPES:
        for step in recipe.steps:
            if step.title in ("torch", "download", "build tools"):
                assert any("==" in part for part in step.command(Place(tmp_path))), step.title

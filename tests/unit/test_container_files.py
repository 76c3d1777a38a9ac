"""The files that containers are made from agree with each other."""

from __future__ import annotations

import re

from tests.architecture.tree import ROOT

COMPOSE = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
EXAMPLE = (ROOT / ".env.example").read_text(encoding="utf-8")


def test_every_setting_is_in_the_example_with_its_default() -> None:
    example = dict(re.findall(r"^#([A-Z_]+)=(.*)$", EXAMPLE, re.MULTILINE))
    defaults = dict(re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", COMPOSE))
    passed_on = set(re.findall(r"(?:PIP|REDIS)_[A-Z_]+", COMPOSE))
    assert set(example) == set(defaults) | passed_on
    assert {name: example[name] for name in defaults} == defaults


def test_the_example_changes_nothing_before_it_is_edited() -> None:
    lines = EXAMPLE.splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == []


def test_nothing_asks_for_what_some_engines_refuse() -> None:
    for word in ("privileged", "ulimits", "container_name", "network_mode"):
        assert f"{word}:" not in COMPOSE
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert "syntax=" not in dockerfile
    assert re.findall(r"^USER (\w+)$", dockerfile, re.MULTILINE) == ["diptych"]
    assert re.findall(r"^(?:ENTRYPOINT|CMD) (.)", dockerfile, re.MULTILINE) == ["["]

"""Channels by name."""

import subprocess
import sys

import pytest

from diptych.domain.errors import InvalidField
from diptych.transfer.memory import MemoryFabric
from diptych.transfer.open import KINDS, open_channel
from tests.contract.channel_rig import Memory, Started, piece


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_that_is_named_opens_and_reads_from_its_like(kind: str) -> None:
    owner, reader = open_channel(kind, "127.0.0.1", 0), open_channel(kind, "127.0.0.1", 0)
    assert owner.kind == reader.kind == kind
    target = Memory(8)
    assert Started(reader, piece(owner.register(Memory(8, fill=7).span)), target.span).end() is None
    assert (target.data == 7).all()
    owner.close()
    reader.close()


def test_an_unknown_kind_names_those_that_are() -> None:
    with pytest.raises(InvalidField, match="grpc, memory, nixl, is 'pigeon'"):
        open_channel("pigeon", "127.0.0.1", 0)


def test_only_who_opens_a_grpc_channel_imports_grpc() -> None:
    code = "import sys, diptych.transfer.open; print('grpc' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout == "False\n"


def test_an_address_of_a_fabric_is_taken_once() -> None:
    fabric = MemoryFabric()
    channel = fabric.open("here", 7)
    with pytest.raises(InvalidField, match="here:7"):
        fabric.open("here", 7)
    channel.close()
    fabric.open("here", 7).close()

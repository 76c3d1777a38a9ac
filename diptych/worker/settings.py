"""What every worker with an engine is told at its start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from diptych.engine.catalog import DEFAULT, ModelRef
from diptych.engine.settings import EngineSettings, Profile, Weights
from diptych.rpc.settings import ServiceSettings
from diptych.transfer.nixl_library import Transport
from diptych.worker.channel import ChannelSettings


def cores_of(pin: str) -> tuple[int, ...]:
    """The numbers of a list such as "0-3,6"."""
    cores: list[int] = []
    for part in pin.split(",") if pin else []:
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


class WorkerSettings(ServiceSettings):
    """Flags, `DIPTYCH_*`, defaults; in this order."""

    model: str = Field(DEFAULT, min_length=1, description="name, directory, hub id, .gguf file, or toy")
    model_name: str = Field("", description="the name clients ask for; empty: the model's own")
    profile: Literal["fast", "exact"] = "fast"
    device: str = "cpu"
    threads: int = Field(1, ge=1, le=256, description="CPU threads of the engine")
    weights: Literal["bf16", "int4", "auto"] = Field(
        "bf16", description="what decode steps read; auto: 4 bits for few rows (profile fast)"
    )
    pin: str = Field(
        "", pattern=r"^(\d+(-\d+)?(,\d+(-\d+)?)*)?$", description="CPU cores of the engine, such as 0-3,6"
    )
    num_blocks: int | None = Field(None, ge=1, description="blocks in the KV pool; empty: as memory allows")
    block_tokens: int = Field(16, ge=1, le=256, description="tokens in a block of the pool")
    max_context: int | None = Field(None, ge=2, description="positions of a request; empty: the model's own")
    channels: str = Field(
        "auto", pattern=r"^(auto|(nixl|grpc)(,(nixl|grpc))*)$",
        description="how KV crosses, best first, such as nixl,grpc; auto: whatever works here",
    )  # fmt: skip
    nixl_transport: Transport = Field(
        "auto", description="what NIXL reads over; tcp: a reader's death may end the worker it reads from"
    )
    toy_step_delay_s: float = Field(0.0, ge=0, le=60, description="how long a step of the toy model takes")

    def channel_settings(self) -> ChannelSettings:
        """What the engine process needs to open its KV channels."""
        return ChannelSettings(
            self.channels, self.listen_host, self.advertise_host, self.tls_cert, self.tls_key, self.tls_ca,
            self.nixl_transport,
        )  # fmt: skip

    def engine_settings(self, model: ModelRef) -> EngineSettings:
        """What the engine process needs of it."""
        return EngineSettings(
            model_path=str(model.path),
            profile=Profile(self.profile),
            device=self.device,
            num_blocks=self.num_blocks,
            block_tokens=self.block_tokens,
            weights=Weights(self.weights),
            threads=self.threads,
            cores=cores_of(self.pin),
            max_context=self.max_context,
            toy_step_delay_s=self.toy_step_delay_s,
        )

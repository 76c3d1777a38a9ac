"""What a cache is told at its start."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import ByteSize, Field, field_validator

from diptych.rpc.settings import ServiceSettings
from services.cache.arena import ALIGN


class CacheSettings(ServiceSettings):
    """See ServiceSettings for what all services share."""

    budget_bytes: ByteSize = Field(
        ByteSize(1 << 30), validate_default=True, description="host memory for chunks, such as 4GiB"
    )
    channel: Literal["grpc"] = Field("grpc", description="how chunks are read, here and by others")
    kv_port: int = Field(0, ge=0, le=65535, description="port that the channel listens on; 0: a free one")
    read_s: float = Field(10.0, gt=0, le=600, description="most seconds that reading a chunk may take")
    max_reads: int = Field(8, ge=1, le=1024, description="chunks that are read at the same time")
    max_leases: int = Field(4096, ge=1, le=1_000_000, description="loans that are out at the same time")
    max_lease_s: float = Field(60.0, gt=0, le=3600, description="longest loan")

    @field_validator("budget_bytes")
    @classmethod
    def _fits_the_machine(cls, value: ByteSize) -> ByteSize:
        physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if not ALIGN <= value <= physical_bytes:
            raise ValueError(
                f"must be from {ALIGN} to the machine's {physical_bytes} bytes of memory, is {int(value)}"
            )
        return value

    @property
    def arena_bytes(self) -> int:
        """The budget in whole units of the arena."""
        return self.budget_bytes // ALIGN * ALIGN

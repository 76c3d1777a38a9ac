"""What a prefill worker is told at its start."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from diptych.engine.catalog import ModelRef
from diptych.engine.settings import Weights
from diptych.worker.settings import WorkerSettings
from services.prefill.loop import LoopSettings


class PrefillServiceSettings(WorkerSettings):
    """Flags, `DIPTYCH_*`, defaults; in this order."""

    max_jobs: int = Field(
        2, ge=1, le=256, description="jobs claimed at a time: one runs while one is fetched"
    )
    send_slots: int = Field(16, ge=1, le=4096, description="chunks that may wait to be read")
    landing_slots: int = Field(2, ge=1, le=256, description="borrowed chunks that may be read at a time")
    lease_s: float = Field(30.0, gt=0, le=3600, description="how long a chunk stays readable at most")
    offer_chunks: bool = Field(True, description="offer whole chunks to the cache service")
    borrow_chunks: bool = Field(True, description="read whole chunks from it instead of computing them")
    sweep_s: float = Field(2.5, gt=0, le=600, description="a job claimed so long ago goes to another worker")

    def loop_settings(self, model: ModelRef) -> LoopSettings:
        """What the engine process is told."""
        return LoopSettings(
            # Its KV is shared: 4-bit weights are for decode steps only.
            engine=replace(self.engine_settings(model), weights=Weights.BF16),
            kv=self.channel_settings(),
            num_send_slots=self.send_slots,
            num_landing_slots=self.landing_slots,
            lease_s=self.lease_s,
            offer_chunks=self.offer_chunks,
        )

"""What a decode worker is told at its start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from diptych.engine.catalog import ModelRef
from diptych.text.tokenizer import Tokenizer
from diptych.worker.settings import WorkerSettings
from services.decode.handoffs import HandoffSettings
from services.decode.links import LinkBound
from services.decode.loop import LoopSettings


class DecodeServiceSettings(WorkerSettings):
    """Flags, `DIPTYCH_*`, defaults; in this order."""

    role: Literal["decode", "both"] = Field(
        "decode", description="both: prefill everything here, hand off nothing"
    )
    threshold_tokens: int = Field(
        256, ge=0, description="an uncached rest up to this is prefilled here (M11)"
    )
    max_batch: int = Field(64, ge=1, le=1024, description="requests in one step")
    itl_slack: float = Field(
        0.25, ge=0, le=10, description="by how much local prefill may lengthen a decode step"
    )
    pool_share: float = Field(
        0.6, gt=0, le=1, description="most of the KV pool that one request may need (M13)"
    )
    begin_timeout_s: float = Field(10.0, gt=0, le=600, description="from posting a job to a worker's Begin")
    stall_timeout_s: float = Field(2.0, gt=0, le=600, description="between two signs of life of a prefill")
    read_timeout_s: float = Field(5.0, gt=0, le=600, description="of one chunk")
    max_rtt_us: float = Field(
        0.0, ge=0, le=1e9,
        description="round trip to a prefill worker, in µs, past which the link is too slow; 0: none. "
        "Disaggregation's usual figure for RDMA is 50; gRPC on one machine takes hundreds (M12)",
    )  # fmt: skip
    enforce_rtt: bool = Field(False, description="hand no prompt over links that are too slow")
    detach_grace_s: float = Field(
        10.0, ge=0, le=3600, description="how long a request outlives the death of its router"
    )
    landing_slots: int = Field(4, ge=1, le=1024, description="chunks that may be read at the same time")

    @property
    def link_bound(self) -> LinkBound:
        """What links are held against."""
        return LinkBound(self.max_rtt_us / 1e6, self.enforce_rtt)

    def loop_settings(self, model: ModelRef, tokenizer: Tokenizer) -> LoopSettings:
        """What the engine process is told."""
        return LoopSettings(
            engine=self.engine_settings(model),
            handoff=HandoffSettings(
                begin_timeout_s=self.begin_timeout_s,
                stall_timeout_s=self.stall_timeout_s,
                read_timeout_s=self.read_timeout_s,
            ),
            eos_ids=sorted(tokenizer.eos_ids),
            tokenizer_digest=tokenizer.digest,
            colocated=self.role == "both",
            threshold_tokens=self.threshold_tokens,
            max_batch=self.max_batch,
            itl_slack=self.itl_slack,
            pool_share=self.pool_share,
            kv=self.channel_settings(),
            num_landing_slots=self.landing_slots,
        )

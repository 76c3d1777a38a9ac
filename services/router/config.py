"""What a router is told at its start, and the limits that follow from it."""

from __future__ import annotations

from typing import Final, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from diptych.domain.ids import Cell
from diptych.rpc.settings import ServiceSettings
from services.router.decisions import Limits

MIN_SECRET_CHARS: Final = 16


class RouterSettings(ServiceSettings):
    """See ServiceSettings for what all services share."""

    model: str = Field(
        "smollm2-135m", min_length=1, description="the model served: a name, directory, file or hub id"
    )
    model_name: str = Field("", max_length=200, description="the name it is served by; empty: its own")
    secret: SecretStr = Field(
        SecretStr(""),
        max_length=1024,
        description="signs resume tokens; the same for all routers, best said as DIPTYCH_SECRET. "
        "Empty: they agree on one through the store",
    )
    max_queue: int = Field(
        256, ge=0, le=100_000, description="requests that may wait for a decode worker with room"
    )
    max_wait_s: float = Field(
        30.0, gt=0, le=3600, description="most seconds that a request waits for a decode worker"
    )
    max_share: float = Field(
        0.6, gt=0, le=1, description="most of a decode worker's pool that one request may need"
    )
    max_prompt_bytes: int = Field(2 << 20, ge=1, le=4 << 20, description="longest prompt that is tokenised")
    session_heartbeat_s: float = Field(
        0.25, gt=0, le=10, description="seconds between signs of life to decode workers"
    )
    session_silent_s: float = Field(
        2.0, gt=0, le=60, description="seconds of silence after which a decode worker is lost"
    )
    cancel_wait_s: float = Field(
        5.0, gt=0, le=60, description="most seconds that a cancelled request waits for its worker's word"
    )
    max_moves: int = Field(
        4, ge=0, le=100, description="decode workers that a request may lose before it fails"
    )
    moves_per_s: float = Field(
        20.0, gt=0, le=10_000, description="requests a second that move on when their worker is lost"
    )
    slow_client_s: float = Field(
        30.0, gt=0, le=3600, description="seconds that a client may take nothing before it is cancelled"
    )

    @field_validator("secret")
    @classmethod
    def _secret_is_hard_to_guess(cls, secret: SecretStr) -> SecretStr:
        if 0 < len(secret.get_secret_value()) < MIN_SECRET_CHARS:
            raise ValueError(f"must have at least {MIN_SECRET_CHARS} characters")
        return secret

    @model_validator(mode="after")
    def _silence_is_longer_than_a_heartbeat(self) -> Self:
        if self.session_silent_s < 2 * self.session_heartbeat_s:
            raise ValueError("session_silent_s must be at least two session_heartbeat_s")
        return self

    def limits(self, model_name: str) -> Limits:
        """What the policy may do. `model_name`: workers that serve another model are none of ours."""
        return Limits(
            model=model_name,
            cell=Cell(self.cell),
            max_queue=self.max_queue,
            max_wait_s=self.max_wait_s,
            max_share=self.max_share,
            max_overcommit=2.0,
            output_reserve=512,
            prefix_slack=4,
            cancel_wait_s=self.cancel_wait_s,
            max_moves=self.max_moves,
            moves_per_s=self.moves_per_s,
            move_burst=8,
            redial_min_s=0.1,
            redial_max_s=2.0,
        )

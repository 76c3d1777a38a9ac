"""A FakeDecode that lets routers attach: what a broken session leaves runs on, and so does what has ended."""

from __future__ import annotations

from typing import Any

from diptych.domain.errors import DiptychError, InvalidField, Stale
from diptych.v1 import common_pb2, decode_pb2
from tests.support.fake_decode import FakeDecode, FakeSession, Running


class ResumableDecode(FakeDecode):
    """Nothing is forgotten but what was cancelled; `piece_tokens` cuts the answer to an attachment."""

    def __init__(self, worker_id: str = "decode-0", *, piece_tokens: int = 3, **options: Any) -> None:
        super().__init__(worker_id, **options)
        self.kept: dict[str, Running] = {}
        self.attaches: list[decode_pb2.SessionAttach] = []
        self.acknowledged: list[str] = []
        self.hold_answers = False
        """Take attachments, and answer when `release` is called."""
        self._held: list[tuple[FakeSession, decode_pb2.SessionAttach]] = []
        self._piece_tokens = piece_tokens

    def release(self) -> None:
        """Answers what was held."""
        self.hold_answers = False
        for session, attach in self._held:
            self._attach(session, attach)
        self._held.clear()

    def _forget(self, session: FakeSession) -> None:
        """A session broke: its requests run on."""

    def _submitted(self, session: FakeSession, submit: decode_pb2.Submit) -> None:
        super()._submitted(session, submit)
        if submit.request_id in self.running:
            self.kept[submit.request_id] = self.running[submit.request_id]

    def _take(self, session: FakeSession, request: decode_pb2.SessionRequest) -> None:
        match request.WhichOneof("body"):
            case "attach":
                self.attaches.append(request.attach)
                self.received.append(f"attach {request.attach.request_id}")
                if self.hold_answers:
                    self._held.append((session, request.attach))
                else:
                    self._attach(session, request.attach)
            case "acknowledge":
                self.acknowledged.append(request.acknowledge.request_id)
            case "cancel" if self._is_others(session, request.cancel.request_id):
                self.received.append(f"cancel {request.cancel.request_id}")
            case "cancel":
                super()._take(session, request)
                self.kept.pop(request.cancel.request_id, None)
            case _:
                super()._take(session, request)

    def _is_others(self, session: FakeSession, request_id: str) -> bool:
        running = self.running.get(request_id)
        return running is not None and running.session is not session

    def _attach(self, session: FakeSession, attach: decode_pb2.SessionAttach) -> None:
        try:
            self._hand_over(session, attach)
        except DiptychError as error:
            failure = common_pb2.Failure(kind=type(error).__name__, message=str(error), retry=error.retry)
            refused = decode_pb2.AttachRefused(request_id=attach.request_id, failure=failure)
            session.outbox.put_nowait(decode_pb2.SessionResponse(refused=refused))

    def _hand_over(self, session: FakeSession, attach: decode_pb2.SessionAttach) -> None:
        running = self.kept.get(attach.request_id)
        if running is None or running.submit.tenant != attach.tenant:
            raise Stale(f"{attach.request_id} is not here")
        if attach.next_index > running.num_output:
            raise InvalidField("next_index", f"is {attach.next_index}, there are {running.num_output}")
        before, running.session = running.session, session
        if before is not session and before in self.sessions:
            finish = common_pb2.Finish(reason=common_pb2.FINISH_REASON_ABORT)
            self.send(before, decode_pb2.Delta(request_id=attach.request_id, finish=finish))
        num_prompt = len(running.tokens) - running.num_output
        submit = decode_pb2.Submit()
        submit.CopyFrom(running.submit)
        cut = num_prompt + attach.next_index
        submit.num_tokens, submit.num_output = cut, attach.next_index
        submit.tokens[:] = running.tokens[: min(cut, self._piece_tokens)]
        session.outbox.put_nowait(decode_pb2.SessionResponse(attached=submit))
        for offset in range(self._piece_tokens, cut, self._piece_tokens):
            tokens = running.tokens[offset : min(cut, offset + self._piece_tokens)]
            piece = decode_pb2.PromptPiece(request_id=attach.request_id, offset=offset, tokens=tokens)
            session.outbox.put_nowait(decode_pb2.SessionResponse(piece=piece))
        past = running.tokens[cut:]
        delta = decode_pb2.Delta(request_id=attach.request_id, index=attach.next_index, tokens=past)
        delta.text = "".join(map(self._text_of, past))
        if attach.request_id not in self.running:
            delta.finish.reason = common_pb2.FINISH_REASON_LENGTH
        if delta.tokens or delta.HasField("finish"):
            self.send(session, delta)

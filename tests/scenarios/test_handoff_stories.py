"""The hand-off between decode and prefill, as stories: real loops, runner, rings and channel. Commands:

rig NAME=VALUE …                 before anything else; as in PairRig
watch                            from now on, each step is told: which request runs how many tokens
submit ID PROMPT+OUTPUT [PRIORITY]  a request of so many tokens each
cancel ID
turn [N]                         every loop turns N times (once), and what they say is carried
rest                             turns until nothing moves
pass SECONDS                     time
hold N · corrupt N · fail N      what becomes of the N-th read (0: each); `release` lets held ones go on
claim no|yes                     whether the prefill worker takes jobs
lose ID ATTEMPT                  the stream of an attempt breaks
mute ID ATTEMPT                  nothing of an attempt gets through from now on
unpost ID                        the bus did not take the job
alone                            no prefill worker is known any more
show                             blocks and slots of the decode worker
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from diptych.domain.ids import RequestId
from diptych.domain.plan import StepPlan
from diptych.domain.sampling import SamplingParams
from services.decode import messages as d
from services.prefill import messages as p
from tests.support.pair_rig import PairRig

STORIES = sorted(
    path for kind in ("handoff", "steps") for path in Path(__file__).parent.glob(f"{kind}_*.story")
)


def told(message: object) -> str:
    match message:
        case d.JobPosted():
            job = f"{message.num_tokens} tokens, {message.num_held} held"
            return f"decode: job of {message.request_id}, {job}"
        case d.JobWithdrawn():
            return f"decode: job of {message.request_id} withdrawn"
        case d.BeginAnswer():
            refusal = message.refusal
            return f"decode: refused, {refusal.kind}" if refusal else f"decode: attempt {message.attempt}"
        case d.ChunkDone():
            return f"decode: {message.request_id}#{message.attempt} chunk {message.index} landed"
        case d.AttemptEnded():
            return f"decode: {message.request_id}#{message.attempt} ended, {message.reason or 'complete'}"
        case d.TokensOut():
            return told_tokens(message)
        case p.ChunkAnnounced():
            end = message.start + message.num_tokens
            key = f"{message.key.request_id}#{message.key.attempt}"
            return f"prefill: {key} chunk {message.index} is tokens {message.start} to {end}"
        case p.ManifestReady():
            return f"prefill: {message.key.request_id}#{message.key.attempt} manifest"
        case p.AttemptOver():
            failure = f", {message.failure.kind}" if message.failure else ""
            return f"prefill: {message.key.request_id}#{message.key.attempt} over{failure}"
    return str(message)


def told_tokens(out: d.TokensOut) -> str:
    said = [f"token {out.index}"] if out.tokens else []
    if out.finish:
        trail, failure = out.finish.trail, out.finish.failure
        said.append(f"{out.finish.reason}: {failure.kind}" if failure else out.finish.reason)
        said += [f"{trail.path} ({trail.path_reason})"] if trail.path else []
        said += [f"{reason} {count}" for reason, count in trail.fallbacks.items()]
        said += [f"preempted {trail.num_preempted}"] if trail.num_preempted else []
    return f"client: {out.request_id} {', '.join(said)}"


def told_step(name: str, plan: StepPlan) -> str:
    return f"{name} runs " + ", ".join(f"{len(step.tokens)} of {step.request_id}" for step in plan.steps)


class Story:
    """Runs commands against one rig."""

    def __init__(self) -> None:
        self.rig = PairRig()
        self.log: list[str] = []
        self.muted: set[tuple[str, int]] = set()
        self.held = False
        self._listen()

    def run(self, line: str) -> Iterator[str]:
        command, *words = line.split()
        yield from getattr(self, f"do_{command}")(*words)
        yield from self.log
        self.log.clear()

    def do_rig(self, *words: str) -> Iterable[str]:
        self.rig.close()
        self.rig = PairRig(**{name: int(value) for name, value in (word.split("=") for word in words)})  # type: ignore[arg-type]
        self._listen()
        return ()

    def do_watch(self) -> Iterable[str]:
        self.rig.on_step = lambda name, plan: self.log.append(told_step(name, plan))
        return ()

    def do_submit(self, name: str, size: str, priority: str = "0") -> Iterable[str]:
        num_prompt, num_output = map(int, size.split("+"))
        tokens = [(sum(name.rstrip("0123456789").encode()) + 5 * i) % 256 for i in range(num_prompt)]
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        self.rig.submit(name, tokens, params, priority=int(priority))
        return ()

    def do_cancel(self, name: str) -> Iterable[str]:
        self.rig.cancel(name)
        return ()

    def do_turn(self, times: str = "1") -> Iterable[str]:
        for _ in range(int(times)):
            self._turn()
        return ()

    def do_rest(self) -> Iterable[str]:
        for _ in range(1000):
            moved = self._turn()
            if not moved and self._quiet():
                return ()
        return ("never came to rest",)

    def do_pass(self, seconds: str) -> Iterable[str]:
        self.rig.clock.now += float(seconds)
        return ()

    def do_hold(self, number: str) -> Iterable[str]:
        self.held = True
        self.rig.faults.hold(int(number))
        return ()

    def do_corrupt(self, number: str) -> Iterable[str]:
        self.rig.faults.corrupt(int(number))
        return ()

    def do_fail(self, number: str) -> Iterable[str]:
        self.rig.faults.fail(int(number))
        return ()

    def do_release(self) -> Iterable[str]:
        self.held = False
        self.rig.faults.clear()
        self.rig.faults.release()
        return ()

    def do_claim(self, takes: str) -> Iterable[str]:
        self.rig.takes_jobs = [takes == "yes"]
        return ()

    def do_lose(self, name: str, attempt: str) -> Iterable[str]:
        self.rig.fail_attempt(name, int(attempt))
        return ()

    def do_mute(self, name: str, attempt: str) -> Iterable[str]:
        self.muted.add((name, int(attempt)))
        return ()

    def do_unpost(self, name: str) -> Iterable[str]:
        self.rig.jobs.clear()
        self.rig.tell(d.DecodeInbox(unposted=[RequestId(name)]))
        return ()

    def do_alone(self) -> Iterable[str]:
        self.rig.tell(d.DecodeInbox(surroundings=[d.Surroundings(0, True)]))
        return ()

    def do_show(self) -> Iterator[str]:
        load = self.rig.decode.load()
        yield f"blocks: {load.blocks_owned} owned, {load.blocks_cached} cached of {load.blocks_total}"
        yield f"slots: {load.slots_used} of {load.slots_total}"

    def assert_empty(self) -> None:
        self.do_release()
        self.rig.pump()
        self.rig.assert_empty()
        self.rig.close()

    def _listen(self) -> None:
        self.muted, self.held = set(), False
        self.rig.transit = self._carry

    def _carry(self, message: object) -> list[object]:
        key = getattr(message, "key", None)
        if key is not None and (key.request_id, key.attempt) in self.muted:
            return []
        self.log.append(told(message))
        return [message]

    def _turn(self) -> bool:
        """Reads end within a turn, so that a story does not depend on their speed."""
        moved = self.rig.step()
        self.rig.wait_for_reads(1 if self.held else 0)
        return moved

    def _quiet(self) -> bool:
        loops = (self.rig.decode, *self.rig.prefills)
        reading = self.rig.decode.num_reads > (1 if self.held else 0)
        return not reading and not self.rig.has_messages and not any(loop.runnable for loop in loops)


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path, golden: Callable[[Path, Callable[[str], Iterable[str]]], None]) -> None:
    story = Story()
    golden(path, story.run)
    story.assert_empty()


def test_there_are_stories() -> None:
    assert len(STORIES) >= 12

# Nobody is left: requests wait for a worker, for a bounded time, and then hear what was lost.
workers w0
    dial w0
arrive early 10+10
up w0
    place early on w0
at 1
lost w0 decode_lost
workers
arrive new 10+10
at 5
workers w1
    dial w1
at 10.9
tick
    hang up w0
at 11
tick
    end early: PeerLost: no decode worker took it within 10 s; the first that had it was lost: w0 ended the session
    end new: PeerLost: no decode worker took it within 10 s
counters
    no_decode_worker: 2
    decode_lost: 1
# One in time serves who is still waiting.
at 12
arrive again 10+10
up w1
    place again on w1
finish again

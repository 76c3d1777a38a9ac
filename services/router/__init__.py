"""The router: the front door for clients, and the one place that chooses a decode worker for a request.

A request's life here, in ten lines:

    1   server.py    `Generate` is called
    2   validate.py  every field is held against its bound; chat template, tokenising
    3   loop.py      admits it; policy.py decides: a decode worker, the queue, or a refusal with a retry delay
    4   session.py   submits it on the worker's one stream (outgoing.py: in pieces, so that cancels overtake)
    5                each step's deltas come down that stream, for all requests of this router at once
    6   requests.py  takes them in, checks that indexes are contiguous, keeps them for a slow client
    7   server.py    writes them to the client, until exactly one message with `finish`
    8                the client goes: a cancel overtakes all else; the request stays until its worker confirms
    9                the worker goes: policy.py moves its requests on, prompt and output together, same seed
    10  attach.py    the router goes: clients show their tokens to another, which asks the worker for them

What is left of it then is counters, and a sample of its times.
"""

"""The decode service: owns requests from admission to their last token.

    router's session ─▶ server ─▶ worker      the I/O process
                                   │ messages
                        brain ◀─▶ loop        the engine process

1. `server` takes a submission, `worker` checks it and passes it to the engine process.
2. `scheduler` admits it: blocks are taken, cached prefix kept; `admission` says where the rest is prefilled.
3. Here: chunks of it run beside the decodes, within `pace`'s budget.
4. Elsewhere: `jobs` posts it; a prefill worker calls `Begin`, and `handoffs` reads what it announces.
5. When the manifest is complete the request runs: one token a step, batched, until a reason to finish.
6. `outputs` makes text of the tokens; one message a step and session goes back.
"""

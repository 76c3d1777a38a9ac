"""`python -m tests.support.fake_decode_process REDIS_URL SHARD NAME`: a registered FakeDecode, by itself.

For what can only be done to a process: to stop it, and to kill it.
"""

import asyncio
import sys

from diptych.store.connect import connect
from diptych.store.membership import Membership
from diptych.store.registry import Registry
from tests.support.fake_decode import FakeDecode


async def main(url: str, shard: str, name: str) -> None:
    redis = await connect(url)
    # Slow enough that a test can act in the middle of a stream.
    async with FakeDecode(name, step_s=0.01) as worker:
        membership = Membership(Registry(redis, shard), lambda: worker.record, 0.1, 2.0)
        await membership.start()
        sys.stdout.write(f"decode {name} listening on {worker.address}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

"""BlockPool and KvPools against naive models, under any order of operations."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diptych.domain.blocks import BlockPool, OutOfBlocks, PoolAudit
from diptych.domain.errors import Internal
from diptych.domain.hashing import block_hashes
from diptych.domain.holding import Holding, KvPools
from diptych.domain.ids import BlockHash, BlockId

NUM_BLOCKS = 6
NAMES = [BlockHash(bytes([i]) * 16) for i in range(8)]
names = st.sampled_from(NAMES)


class PoolMachine(RuleBasedStateMachine):
    """The model keeps a plain record of each block and the order in which cached ones were released."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 4)
        self.refs = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.name: dict[int, BlockHash] = {}
        self.released: list[int] = []  # cached, least recently released first
        self.hands: list[list[BlockId]] = []  # what each owner holds

    def holder(self, name: BlockHash) -> int | None:
        return next((block for block, held in self.name.items() if held == name), None)

    @rule(n=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, n: int) -> None:
        free = [b for b in self.refs if self.refs[b] == 0 and b not in self.name]
        if n > len(free) + len(self.released):
            before = self.pool.audit()
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(n)
            assert self.pool.audit() == before
            return
        evicted = self.released[: max(0, n - len(free))]
        got = self.pool.allocate(n)
        assert len(set(got)) == n
        assert all(self.refs[b] == 0 for b in got), "a block that somebody owns was given away"
        assert set(got) <= {*free, *evicted}, "evicted out of order, or while blocks were free"
        for block in evicted:
            self.released.remove(block)
            del self.name[block]
        for block in got:
            self.refs[block] = 1
        self.hands.append(got)

    @rule(chain=st.lists(names, max_size=4))
    def lookup_then_acquire(self, chain: list[BlockHash]) -> None:
        found = self.pool.lookup(chain)
        expected = 0
        while expected < len(chain) and self.holder(chain[expected]) is not None:
            expected += 1
        assert found == expected
        if found < len(chain):
            before = self.pool.audit()
            with pytest.raises(Internal, match="no block holds"):
                self.pool.acquire(chain)
            assert self.pool.audit() == before
        free_before = self.pool.num_free
        evictable = self.pool.num_evictable(list(dict.fromkeys(chain[:found])))
        got = self.pool.acquire(chain[:found])
        assert free_before - self.pool.num_free == evictable
        assert got == [self.holder(name) for name in chain[:found]]
        for block in got:
            self.refs[block] += 1
            if block in self.released:
                self.released.remove(block)
        self.hands.append(got)

    @precondition(lambda self: any(self.hands))
    @rule(data=st.data(), name=names)
    def publish(self, data: st.DataObject, name: BlockHash) -> None:
        block = data.draw(st.sampled_from([b for hand in self.hands for b in hand]))
        if self.name.get(block, name) != name:
            with pytest.raises(Internal, match="another hash"):
                self.pool.publish(block, name)
            return
        self.pool.publish(block, name)
        if self.holder(name) is None:
            self.name[block] = name

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hand = self.hands.pop(data.draw(st.integers(0, len(self.hands) - 1)))
        self.pool.release(hand)
        for block in reversed(hand):
            self.refs[block] -= 1
            if self.refs[block] == 0 and block in self.name:
                self.released.append(block)

    @rule(data=st.data())
    def unowned_blocks_are_refused(self, data: st.DataObject) -> None:
        unowned = [b for b, refs in self.refs.items() if refs == 0] + [-1, NUM_BLOCKS]
        block = BlockId(data.draw(st.sampled_from(unowned)))
        with pytest.raises(Internal, match="no owner"):
            self.pool.release([block])
        with pytest.raises(Internal, match="no owner"):
            self.pool.publish(block, NAMES[0])

    @rule()
    def drop_cache(self) -> None:
        self.pool.drop_cache()
        for block in self.released:
            del self.name[block]
        self.released = []

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.owned == {b: refs for b, refs in self.refs.items() if refs}
        owned, cached = len(self.pool.owned), len(self.released)
        assert self.pool.audit() == PoolAudit(NUM_BLOCKS - owned - cached, cached, owned, NUM_BLOCKS)
        assert self.pool.num_free == NUM_BLOCKS - owned

    def teardown(self) -> None:
        for hand in self.hands:
            self.pool.release(hand)
        self.pool.drop_cache()
        assert self.pool.audit() == PoolAudit(NUM_BLOCKS, 0, 0, NUM_BLOCKS)


BLOCK_TOKENS = 2
GROUPS = (7, 5)
prompts = st.builds(lambda token, n: [7, 7] + [token] * n, st.integers(0, 2), st.integers(0, 9))


class HoldingMachine(RuleBasedStateMachine):
    """Requests over two groups of unequal size. The model is what was written into each block."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = KvPools([BlockPool(n, BLOCK_TOKENS) for n in GROUPS])
        self.alive: list[tuple[Holding, list[int]]] = []
        self.memory: list[dict[int, tuple[int, ...]]] = [{} for _ in GROUPS]

    def hashes(self, tokens: list[int]) -> list[BlockHash]:
        return block_hashes(BlockHash(b"root"), tokens, BLOCK_TOKENS)

    @rule(tokens=prompts)
    def open(self, tokens: list[int]) -> None:
        most = max(len(tokens) - 1, 0)
        found = self.pools.cached_tokens(self.hashes(tokens), most)
        fits = self.pools.can_open(self.hashes(tokens), most, len(tokens))
        holding = self.pools.open(self.hashes(tokens), most)
        assert holding.num_cached_tokens == holding.num_tokens == found <= most
        assert fits == self.pools.can_grow(holding, len(tokens))
        for table, memory in zip(holding.tables, self.memory, strict=True):
            held = [memory[block] for block in table]
            assert held == [tuple(tokens[: (i + 1) * BLOCK_TOKENS]) for i in range(len(table))], "foreign KV"
        self.alive.append((holding, tokens))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        holding, tokens = data.draw(st.sampled_from(self.alive))
        upto = data.draw(st.sampled_from([0, len(tokens) // 2, len(tokens)]))
        tables = [list(table) for table in holding.tables]
        if not self.pools.can_grow(holding, upto):
            with pytest.raises(OutOfBlocks):
                holding.grow(upto)
            assert [list(table) for table in holding.tables] == tables
            return
        holding.grow(upto)
        assert holding.num_tokens >= upto
        assert len({len(table) for table in holding.tables}) == 1
        for table, old, memory in zip(holding.tables, tables, self.memory, strict=True):
            assert table[: len(old)] == old
            for i in range(holding.num_cached_tokens // BLOCK_TOKENS, upto // BLOCK_TOKENS):
                memory[table[i]] = tuple(tokens[: (i + 1) * BLOCK_TOKENS])
        holding.publish_upto(upto, self.hashes(tokens))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holding, _ = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))
        lent = holding.tables
        before = [list(table) for table in lent]
        holding.release()
        assert [list(table) for table in lent] == before, "a plan's lists changed under it"
        for again in (holding.release, lambda: holding.grow(1), lambda: holding.publish_upto(0, [])):
            with pytest.raises(Internal, match="released"):
                again()

    @rule()
    def drop_cache(self) -> None:
        self.pools.drop_cache()

    @invariant()
    def owned_is_what_holdings_hold(self) -> None:
        self.pools.check_integrity(holding for holding, _ in self.alive)
        if not self.alive:
            assert self.pools.free_tokens == self.pools.total_tokens == min(GROUPS) * BLOCK_TOKENS

    def teardown(self) -> None:
        for holding, _ in self.alive:
            holding.release()
        self.pools.drop_cache()
        assert self.pools.audit() == tuple(PoolAudit(n, 0, 0, n) for n in GROUPS)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHolding = HoldingMachine.TestCase
TestHolding.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    chain = pool.allocate(3)
    for block, name in zip(chain, NAMES, strict=False):
        pool.publish(block, name)
    pool.release(chain)
    assert pool.allocate(2)[1] == chain[2]
    assert pool.lookup(NAMES[:3]) == 2
    assert pool.allocate(2) == [chain[1], chain[0]]
    assert pool.lookup(NAMES[:3]) == 0


def computed(pools: KvPools, hashes: list[BlockHash]) -> Holding:
    """A request of full blocks, all of them computed here and published."""
    num_tokens = len(hashes) * pools.block_tokens
    holding = pools.open([], 0)
    holding.grow(num_tokens)
    holding.publish_upto(num_tokens, hashes)
    return holding


def test_a_prefix_counts_only_as_far_as_every_group_holds_it() -> None:
    pools = KvPools([BlockPool(6, 4), BlockPool(4, 4)])
    computed(pools, NAMES[:3]).release()
    other = computed(pools, NAMES[4:6])  # evicts the tail in the small group alone
    assert [pool.lookup(NAMES[:3]) for pool in pools.pools] == [3, 2]
    assert pools.cached_tokens(NAMES[:3], 100) == 8
    holding = pools.open(NAMES[:3], 100)
    assert holding.num_cached_tokens == 8
    pools.check_integrity([holding, other])


def test_cached_blocks_are_not_counted_as_both_prefix_and_room() -> None:
    pools = KvPools([BlockPool(4, 4)])
    computed(pools, NAMES[:3]).release()
    assert pools.free_tokens == 16
    assert pools.can_open(NAMES[:2], 8, 16)
    assert not pools.can_open(NAMES[:2], 8, 17)
    running = pools.open(NAMES[:3], 12)
    assert pools.can_open(NAMES[:3], 12, 16)
    assert not pools.can_open(NAMES[4:], 12, 8)
    running.release()


def test_a_leaked_holding_is_found() -> None:
    pools = KvPools([BlockPool(4, 4)])
    holding = pools.open([], 0)
    holding.grow(5)
    pools.check_integrity([holding])
    with pytest.raises(Internal, match="do not add up"):
        pools.check_integrity([])
    holding.release()
    pools.check_integrity([])


def test_publishing_past_the_tables_or_the_hashes_is_refused() -> None:
    holding = KvPools([BlockPool(4, 4)]).open([], 0)
    holding.grow(8)
    with pytest.raises(Internal, match="publish_upto"):
        holding.publish_upto(9, NAMES)
    with pytest.raises(Internal, match="publish_upto"):
        holding.publish_upto(8, NAMES[:1])


@pytest.mark.parametrize("pools", [[], [BlockPool(2, 4), BlockPool(2, 8)]])
def test_pools_that_do_not_fit_together_are_refused(pools: list[BlockPool]) -> None:
    with pytest.raises(ValueError, match="one number of tokens"):
        KvPools(pools)


@pytest.mark.parametrize(("num_blocks", "block_tokens"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(num_blocks: int, block_tokens: int) -> None:
    with pytest.raises(ValueError, match="a pool needs"):
        BlockPool(num_blocks, block_tokens)

"""Engines that share a store: each serves the bytes that it would have computed, whatever happens
to the store.

`ByteEngine.serve` checks every byte and returns how many tokens were found (`kv_stores.py`). The
stores are those of `kv_stores.py`, and Mooncake."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from block_pool import BlockPool
from kv_slots import PREFIX_CACHES, MakeCache
from kv_store import KVStore, make_record
from kv_stores import MODEL, STORES, WAIT_S, ByteEngine, FaultyStore, make_request
from kv_tiers import HostTier
from pool_connector import PoolConnector
from prefix_cache_local import compute_hash_chain
from tiered_cache import KVTierConfig, TieredCache

SIZE = 4
TOKENS = list(range(100, 118))  # 4 full blocks and 2 tokens


def make_engine(
    pool: KVStore,
    namespace: Sequence[tuple[str, str]] = MODEL,
    size: int = SIZE,
) -> ByteEngine:
    connector = PoolConnector(pool, load_timeout_s=3 * WAIT_S)
    return ByteEngine(connector, PREFIX_CACHES["hash"](BlockPool(41), size), namespace)


@pytest.fixture
def engines(pool: FaultyStore) -> tuple[ByteEngine, ByteEngine]:
    """The first has computed `TOKENS`."""
    engines = make_engine(pool), make_engine(pool)
    engines[0].serve(TOKENS)
    return engines


@pytest.mark.net
def test_only_what_is_behind_the_local_hit_is_loaded(pool: FaultyStore):
    """And a block that the pool has is neither read nor published. The last token of a prompt is
    always computed (Trap 3)."""
    first, second = make_engine(pool), make_engine(pool)
    assert [first.serve(TOKENS[:10]), second.serve(TOKENS[:5])] == [0, 4]
    assert [second.serve(TOKENS[:10]), second.serve(TOKENS), first.serve(TOKENS)] == [8, 8, 16]
    for engine in (first, second):
        assert len(engine.io.read) == len(engine.io.written) == 2
    for num_tokens, expected in ((1, 0), (4, 0), (5, 4), (8, 4), (9, 8)):
        assert make_engine(pool).serve(TOKENS[:num_tokens]) == expected


KEYS = [(), (("salt", "x"),), (("lora", "x"),), (("salt", "1"),), (("salt", 1),), (("model", "x"),)]
OTHER_MODELS = [  # and how many tokens of TOKENS are found
    (MODEL[::-1], SIZE, 16),
    ((("model", "other"), MODEL[1]), SIZE, 0),
    (MODEL[:1], SIZE, 0),
    ((("model", "float64"), ("dtype", "tiny")), SIZE, 0),
    ((), SIZE, 0),
    (MODEL, 2, 0),
    (MODEL, 8, 0),
]


def test_kv_of_another_model_layout_or_tenant_is_not_found():
    """Traps 8 and 12; and a request cannot spell a namespace."""
    store = HostTier(1000)
    make_engine(store).serve(TOKENS)
    for namespace, size, expected in OTHER_MODELS:
        assert make_engine(store, namespace, size).serve(TOKENS) == expected, namespace
    for prefix in ("", "engine ", "request "):
        keys = [(prefix + tag, value) for tag, value in MODEL]
        assert make_engine(store, namespace=()).serve(TOKENS, keys) == 0
        assert make_engine(store).serve(TOKENS, keys) == 0
    for expected in (0, 16):
        found = [make_engine(store).serve(TOKENS[1:], keys) for keys in KEYS]
        assert found == [expected] * len(KEYS)


# -- faults


def raises(records: list[bytes]) -> list[bytes]:
    raise OSError("cable cut")


def another(block_hash: bytes, tokens: tuple[int, ...], nbytes: int):
    """A right record, but of another hash, of other tokens, or of a smaller block."""
    return lambda records: [make_record((block_hash, tokens), records[0][-nbytes:]), *records[1:]]


FIRST = compute_hash_chain(TOKENS, SIZE, [(f"engine {tag}", value) for tag, value in MODEL])[0]


LIES = {  # of a store that reads these records, and how many tokens are loaded all the same
    "raises": (raises, 0),
    "other order": (lambda records: records[::-1], 0),
    "shifted": (lambda records: records[1:], 0),
    "another block": (another(b"h" * 32, FIRST[1], 40), 0),
    "other tokens": (another(FIRST[0], (0, 0, 0, 0), 40), 0),
    "other size": (another(*FIRST, 39), 0),
    "flipped": (lambda records: [r[:-1] + bytes([r[-1] ^ 1]) for r in records], 0),
    "longer": (lambda records: [r * 2 for r in records], 0),
    "empty": (lambda records: [b""] * 4, 0),
    "nothing": (lambda records: [], 0),
    "one in the middle": (lambda records: [records[0], records[1][1:], *records[2:]], SIZE),
    "too much": (lambda records: [*records, *records], 16),
}
BROKEN = {"has": 0, "negative": 0, "put": 16, "get": 0, "next": 0, "get drop": 0}


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.parametrize("fault", [*LIES, *BROKEN])
def test_nothing_is_written_from_a_corrupt_block_on(fault, engines, pool, caplog):
    """A store that fails costs a computation; after it a good block is found in place of a bad
    one."""
    _, second = engines
    pool.lie, expected = LIES.get(fault) or (list, BROKEN[fault])
    pool.broken = "" if fault in LIES else fault
    assert second.serve(TOKENS) == expected
    assert len(second.io.written) == expected // SIZE
    second.serve([2, *TOKENS])
    assert caplog.text or fault in ("negative", "too much"), "a failure is announced"
    pool.lie = list
    pool.broken = ""
    assert make_engine(pool).serve(TOKENS) == 16


@pytest.mark.parametrize("moment", ["under way", "arrived", "closed"])
def test_a_cancelled_load_writes_nothing_afterwards(engines, pool, moment):
    """Trap 34: its blocks may be another request's by then. A load of the same name in another
    engine goes on (Trap 50)."""
    first, second = engines
    assert first.manager.reset_prefix_cache()
    request, same_name = (make_request("0", TOKENS[:n]) for n in (18, 9))
    pool.hold.clear()
    second.begin(request)
    first.begin(same_name)
    assert pool.entered.wait(WAIT_S)
    connector = second.connector
    if moment == "arrived":
        pool.hold.set()
        connector.wait_for_load(WAIT_S)
    if moment == "closed":
        connector.close()
        with pytest.raises(RuntimeError, match="after shutdown"):
            second.begin(make_request("1", TOKENS))
    else:
        second.manager.free(request)
    pool.hold.set()
    assert not connector._loading and "0" not in connector._loads._loads
    assert first.wait_until_ready(same_name).num_tokens == 8
    assert not second.io.written
    assert make_engine(pool).serve(TOKENS) == 16
    assert moment == "closed" or (second.serve(TOKENS) == 16 and not connector._found)


@pytest.mark.parametrize("num_known", [0, 1, 3])
@pytest.mark.parametrize("kind", ["host", "disk", "pool"])
def test_a_full_store_loses_the_tail_of_a_saved_chain_first(kind, num_known, tmp_path):
    """Trap 11."""
    store = STORES[kind](tmp_path, 4)
    engine = make_engine(store)
    request = make_request("0", TOKENS)
    engine.serve(TOKENS[: num_known * SIZE + 1])
    engine.serve(TOKENS)
    links = engine.connector._chains.chain(request, 4)
    for num_other in range(5):
        held = [block_hash in store for block_hash, _ in links]  # `has` would be a use
        assert held == [index < 4 - num_other for index in range(4)]
        engine.serve([num_other] * SIZE)


@pytest.mark.parametrize(("num_blocks", "num_stored"), [(1, 0), (4, 0), (0, 16)])
def test_refused_blocks_are_neither_stored_nor_loaded_again(engines, pool, num_blocks, num_stored):
    """Nor is what was computed from them. Another engine computes and stores them."""
    engines[0].connector.refuse(make_request("0", TOKENS), num_blocks)
    assert engines[1].serve(TOKENS) == num_stored
    offer = engines[0].connector.get_num_new_matched_tokens(make_request("1", [*TOKENS, 1]), 0)
    assert offer == (num_stored, num_stored > 0)
    assert make_engine(pool).serve(TOKENS) == 16


# -- random prompts

TIERS = {
    "host tier": KVTierConfig(1000),
    "disk tier": KVTierConfig(0, 1000),
    "both tiers": KVTierConfig(2, 1000),
    "small tiers": KVTierConfig(1, 5),
}
EXACT = ("a store", "host tier", "disk tier", "both tiers")  # no block is ever lost
LOSSY = ("host", "disk", "pool", "small tiers")


def make_small_engine(kind: str, pool: FaultyStore, make_cache) -> ByteEngine:
    """With tiers of its own, or with the pool."""
    if kind not in TIERS:
        connector = PoolConnector(pool, load_timeout_s=3 * WAIT_S)
        return ByteEngine(connector, make_cache(BlockPool(9), SIZE), MODEL)
    tiers = TieredCache(TIERS[kind])
    engine = ByteEngine(tiers, make_cache(BlockPool(9), SIZE), MODEL)
    engine.cache.listener = tiers
    return engine


@pytest.mark.net
@pytest.mark.sample(seed=3)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", [*EXACT, *LOSSY])
def test_random_prompts_are_served_right_bytes(kind, seed, make_cache: MakeCache, tmp_path):
    """Engines too small for their prompts. A store that loses nothing serves each prompt all that
    was computed before; of the others, a part of all reads and writes fails."""
    rng = random.Random(f"{kind} {seed}")
    pool = FaultyStore(STORES.get(kind, STORES["host"])(tmp_path, 30 if kind in LOSSY else 1000))
    num_engines = 1 if kind in TIERS else 2
    engines = [make_small_engine(kind, pool, make_cache) for _ in range(num_engines)]
    heads = [[family] * rng.randint(3, 14) for family in range(3)]
    known: set[tuple] = set()
    for _ in range(40):
        tokens = rng.choice(heads) + [rng.randint(10, 11) for _ in range(rng.randint(1, 12))]
        keys = (("salt", "x"),) if rng.random() < 0.2 else ()
        is_error = False
        if kind in LOSSY:
            pool.broken = rng.choice(["", "", "", "", "has", "put", "get", "next"])
            pool.lie = rng.choice([list, list, list, *(lie for lie, _ in LIES.values())])
            is_error = rng.random() < 0.1
        found = rng.choice(engines).serve(tokens, keys, is_error)
        ends = range(SIZE, len(tokens) + 1, SIZE)
        expected = [end for end in ends if (keys, *tokens[:end]) in known and end < len(tokens)]
        assert kind in LOSSY or found == max(expected, default=0), f"{kind} {seed}"
        known |= {(keys, *tokens[:end]) for end in ends}
        for engine in engines:
            check_small_engine(engine, rng if kind in LOSSY else None)
    num_loaded = sum(len(engine.io.written) for engine in engines)
    assert num_loaded > 0 or kind in LOSSY, "nothing was loaded"
    for engine in engines:
        engine.connector.close()


def check_small_engine(engine: ByteEngine, rng: random.Random | None) -> None:
    """Nothing is kept for a request that is gone. Sometimes a bit of some file is
    flipped then."""
    connector = engine.connector
    assert not connector._found and not connector._loading
    if not isinstance(connector, TieredCache):
        return
    disk = connector.disk
    assert len(connector.host) <= connector.config.host_blocks
    assert disk is None or len(disk) <= connector.config.disk_blocks
    if rng is not None and disk is not None and len(disk) and rng.random() < 0.2:
        file = rng.choice(sorted(disk.folder.iterdir()))
        record = bytearray(file.read_bytes())
        record[rng.randrange(len(record))] ^= 1
        file.write_bytes(record)


def test_a_connector_is_bound_to_one_memory():
    """The first engine would load into the second's, and save what is there: wrong tokens."""
    connector = TieredCache(KVTierConfig(host_blocks=1))
    io = object()
    connector.bind(io, 4, [("model", "m")])
    with pytest.raises(ValueError, match="must belong to this engine"):
        connector.bind(object(), 4, [])
    assert connector.io is io

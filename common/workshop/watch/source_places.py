"""Which statement decided what a sentence of the page says, for each engine that may have run.

A sentence is named by a kind of event ("admitted"), by one and what tells its cases apart
("finished:length"), or by a reason to wait ("reason:budget"). Every kind and every reason has a
rule for every scheduler that can bring it up: a test sees to that."""

from __future__ import annotations

from common.workshop.watch.source_lines import Rule, SourcePlace

_BOOKS = "01_batching/scheduler_books.py"
_LOOP = "01_batching/engine_core.py"
_LOOP_AHEAD = "common/runner/overlap.py"
_POOL = "02_paged_kv/block_pool.py"
_TABLES = "02_paged_kv/kv_cache_manager.py"
_MANAGER = "03_prefix_cache/cached_kv_cache_manager.py"
_FCFS = "03_prefix_cache/caching_fcfs_scheduler.py"
_CACHE = "03_prefix_cache/prefix_cache.py"
_HASH = "03_prefix_cache/prefix_cache_local.py"
_RADIX = "03_prefix_cache/radix_cache.py"
_TREE = "03_prefix_cache/radix_tree.py"
_LOADS = "03_prefix_cache/beyond/kv_loads.py"
_LOADING = "03_prefix_cache/beyond/loading_kv_cache_manager.py"
_TWO_PHASE = "04_scheduler/scheduler.py"
_BASE = "04_scheduler/scheduler_base.py"
_POLICIES = "04_scheduler/policies.py"
_QUEUE = "04_scheduler/policy_queue.py"
_WHOLE = "04_scheduler/whole_prompts.py"
_PREFILL = "04_scheduler/beyond/prefill_first_scheduler.py"
_ADDER = "04_scheduler/beyond/prefill_adder.py"
_BATCH = "04_scheduler/beyond/schedule_batch.py"
_OTHERS = "04_scheduler/beyond/sglang_policies.py"
_VERIFY = "05_spec_decode/rejection_sampler.py"
_GUESSES = "05_spec_decode/draft_plugin.py"
_CHUNKS = "06_chunked_prefill/chunk_policy.py"
_ADAPTIVE = "06_chunked_prefill/beyond/adaptive_chunks.py"
_OVERLAPPED = "01_batching/beyond/overlap_plugin.py"
_FORCED = "04_scheduler/beyond/forced_preemption.py"
_TWO, _FIRST, _OLD = "two_phase", "prefill_first", "fcfs"  # the schedulers' names in a header


def _each(sentence: str, **places: SourcePlace) -> list[Rule]:
    """One place for each scheduler."""
    return [Rule(sentence, place, scheduler=name) for name, place in places.items()]


_NO_ROOM = SourcePlace(_FCFS, "CachingFCFSScheduler._admit", "if num_tokens > budget or")
_FULL = SourcePlace(_FCFS, "CachingFCFSScheduler._admit", "if len(self.running) ==")
_NO_SEAT = SourcePlace(_PREFILL, "PrefillFirstScheduler._admit", "if len(self.running) >=")
_ENOUGH_ADDED = SourcePlace(
    _PREFILL, "PrefillFirstScheduler._admit", "if result is not AddReqResult"
)
_TURNED_AWAY = SourcePlace(_TWO_PHASE, "Scheduler._admit", "if outcome not in goes_on")

REQUESTS = [
    Rule("snapshot", SourcePlace("common/engine.py", "LLMEngine.watch", "self._watch = Watch")),
    Rule("arrived", SourcePlace(_BOOKS, "SchedulerBooks.add_request", "self.waiting.add_request")),
    Rule("queue", SourcePlace(_POLICIES, "PriorityPolicy.key", "return"), policy="priority"),
    Rule("queue", SourcePlace(_OTHERS, "LongestOutputFirst.key", "return"), policy="lof"),
    Rule("queue", SourcePlace(_OTHERS, "RandomPolicy.key", "return"), policy="random"),
    Rule("queue", SourcePlace(_OTHERS, "LongestPrefixMatch.arrange", "return"), policy="lpm"),
    Rule(
        "queue",
        SourcePlace(_OTHERS, "DFSWeight.arrange", "return sorted(requests"),
        policy="dfs-weight",
    ),
    Rule(
        "queue",
        SourcePlace(_QUEUE, "PolicyQueue.in_order", "request = oldest.request if has_aged"),
    ),
    *_each(
        "admitted",
        two_phase=SourcePlace(_TWO_PHASE, "Scheduler._fit_in", "step.admitted.append(request)"),
        prefill_first=SourcePlace(_ADDER, "PrefillAdder.add_one_req", "self._add(req, num_tokens)"),
        fcfs=SourcePlace(_FCFS, "CachingFCFSScheduler._admit", "self._seat(request)"),
    ),
    *_each(
        "preempted",
        two_phase=SourcePlace(
            _TWO_PHASE, "Scheduler._get_room", "while not self.kv_memory.allocate"
        ),
        prefill_first=SourcePlace(_BATCH, "ScheduleBatch.retract_decode", "while candidates and"),
    ),
    *_each(
        "preempted:seat",
        two_phase=SourcePlace(_TWO_PHASE, "Scheduler._displaced_by", "return lowest if lowest"),
    ),
    Rule(
        "preempted:forced", SourcePlace(_FORCED, "ForcedPreemption.victim", "candidates = filter")
    ),
    Rule(
        "finished:stop",
        SourcePlace("01_batching/request.py", "Request.append_output_token", "if tok"),
    ),
    Rule(
        "finished:length",
        SourcePlace("01_batching/request.py", "Request.append_output_token", "if tok"),
    ),
    Rule(
        "finished:abort", SourcePlace(_BOOKS, "SchedulerBooks.finish_requests", "for request_id in")
    ),
    Rule(
        "finished:error", SourcePlace(_BOOKS, "SchedulerBooks.take_tokens", "request.status = Req")
    ),
    Rule(
        "cut", SourcePlace("common/outputs.py", "OutputProcessor.process", "if stop_string is not")
    ),
]

REASONS_TO_WAIT = [
    *_each(
        "reason:budget",
        two_phase=SourcePlace(_TWO_PHASE, "Scheduler._fit_in", "if num_tokens == 0"),
        prefill_first=SourcePlace(_ADDER, "PrefillAdder.add_one_req", "if num_tokens == 0 or"),
        fcfs=_NO_ROOM,
    ),
    # Nobody was asked, since the step began with nothing left.
    *_each(
        "reason:budget:nobody",
        two_phase=SourcePlace(_TWO_PHASE, "Scheduler._try_to_admit", "if step.budget == 0"),
        prefill_first=SourcePlace(
            _PREFILL, "PrefillFirstScheduler.get_new_batch_prefill", "step.stop = ('blocks'"
        ),
        fcfs=_NO_ROOM,
    ),
    *_each(
        "reason:blocks",
        two_phase=SourcePlace(
            _TWO_PHASE, "Scheduler._fit_in", "if not self.kv_memory.can_allocate"
        ),
        prefill_first=SourcePlace(
            _ADDER, "PrefillAdder.add_one_req", "if num_needed > self.rem_total"
        ),
        fcfs=_NO_ROOM,
    ),
    # Somebody was preempted in this very step.
    *_each(
        "reason:blocks:nobody",
        two_phase=SourcePlace(_TWO_PHASE, "Scheduler.schedule", "if not step.preempted"),
        prefill_first=SourcePlace(
            _PREFILL, "PrefillFirstScheduler.get_next_batch_to_run", "if self.mixing or step.pre"
        ),
        fcfs=_NO_ROOM,
    ),
    *_each(
        "reason:seat",
        two_phase=SourcePlace(_TWO_PHASE, "Scheduler._try_to_admit", "if len(self.running) >="),
        prefill_first=_NO_SEAT,
        fcfs=_FULL,
    ),
    *_each(
        "reason:seat:nobody",
        two_phase=SourcePlace(
            _TWO_PHASE, "Scheduler._admit", "if len(self.running) >= self.max_num"
        ),
        prefill_first=SourcePlace(
            _PREFILL,
            "PrefillFirstScheduler.get_new_batch_prefill",
            "if self.chunked_req is None and",
        ),
        fcfs=_FULL,
    ),
    # Somebody was admitted, and with that it ended: it took the last seat, or somebody else's.
    *_each("reason:seat:others", two_phase=_TURNED_AWAY, prefill_first=_NO_SEAT, fcfs=_FULL),
    *_each("reason:budget:others", prefill_first=_ENOUGH_ADDED),
    *_each("reason:blocks:others", prefill_first=_ENOUGH_ADDED),
    Rule(
        "reason:constraint",
        SourcePlace(_CHUNKS, "ChunkedPrefill.may_start", "if self._num_long >="),
        setting="max_long_partial_prefills",
    ),
    Rule("reason:constraint", SourcePlace(_BOOKS, "SchedulerBooks.may_start", "return all")),
    Rule(
        "reason:parent",
        SourcePlace(_MANAGER, "CachedKVCacheManager.get_computed_blocks", "return NotReady"),
    ),
    Rule(
        "reason:remote_kv",
        SourcePlace(
            _LOADING, "LoadingKVCacheManager.get_computed_blocks", "if request.request_id not"
        ),
    ),
    Rule(
        "reason:pending", SourcePlace(_OVERLAPPED, "OverlapPlugin.may_start", "return not request")
    ),
    *_each(
        "reason:turn",
        prefill_first=SourcePlace(
            _PREFILL, "PrefillFirstScheduler.get_next_batch_to_run", "if is_turn_of_decodes"
        ),
    ),
    *_each(
        "reason:enough",
        two_phase=_TURNED_AWAY,
        prefill_first=_NO_SEAT,
    ),
]

BLOCKS = [
    Rule("taken", SourcePlace(_POOL, "BlockPool.allocate", "blocks = [")),
    Rule(
        "shared", SourcePlace(_MANAGER, "CachedKVCacheManager.allocate_slots", "self.cache.touch(")
    ),
    Rule("freed", SourcePlace(_POOL, "BlockPool.free", "for block in blocks")),
    Rule("table", SourcePlace(_TABLES, "KVCacheManager._reach", "self._tables[request_id].append")),
    Rule(
        "table:moved", SourcePlace(_MANAGER, "CachedKVCacheManager.cache_blocks", "for index, kept")
    ),
    Rule(
        "matched",
        SourcePlace(_RADIX, "RadixCache._find", "node = self.tree.split"),
        prefix_cache="radix",
    ),
    Rule(
        "matched", SourcePlace(_HASH, "PrefixCacheLocal._find", "for index in"), prefix_cache="hash"
    ),
    Rule(
        "published",
        SourcePlace(_RADIX, "RadixCache._add", "for ref_cnt, run"),
        prefix_cache="radix",
    ),
    Rule(
        "published",
        SourcePlace(_HASH, "PrefixCacheLocal._add", "for index, block"),
        prefix_cache="hash",
    ),
    Rule("published:known", SourcePlace(_CACHE, "PrefixCache.insert", "if known")),
    Rule("split", SourcePlace(_TREE, "RadixTree.cut", "upper = TreeNode"), prefix_cache="radix"),
    Rule(
        "evicted",
        SourcePlace(_RADIX, "RadixCache._pop_oldest", "while len(victims)"),
        prefix_cache="radix",
    ),
    Rule(
        "evicted",
        SourcePlace(_HASH, "PrefixCacheLocal._pop_oldest", "victims = ["),
        prefix_cache="hash",
    ),
    Rule("load_begun", SourcePlace(_LOADS, "KVLoads.start", "blocks = self._take_blocks")),
    Rule("loaded", SourcePlace(_LOADS, "KVLoads._cache_arrived", "result = self.cache.insert")),
    Rule("load_ended", SourcePlace(_LOADS, "KVLoads.drop", "if load.has_arrived")),
]

STEPS = [
    Rule("run", SourcePlace("common/scheduler_assembly.py", "assemble_around", "scheduler = make")),
    *_each(
        "planned",
        two_phase=SourcePlace(_TWO_PHASE, "Scheduler.schedule", "return self.finish_step(step)"),
        prefill_first=SourcePlace(
            _PREFILL, "PrefillFirstScheduler.get_next_batch_to_run", "new_batch = self.get_new"
        ),
        fcfs=SourcePlace("01_batching/fcfs_scheduler.py", "FCFSScheduler.schedule", "admitted ="),
    ),
    # A prompt that was cut: by the adder, by what a step may take, or by the chunks' own size.
    Rule(
        "chunk",
        SourcePlace(_ADDER, "PrefillAdder._num_tokens_now", "end = (start"),
        scheduler=_FIRST,
    ),
    Rule(
        "chunk",
        SourcePlace(_ADAPTIVE, "AdaptiveChunks.num_tokens_now", "num_tokens = min"),
        setting="target_step_ms",
    ),
    Rule(
        "chunk",
        SourcePlace(_CHUNKS, "ChunkedPrefill.num_tokens_now", "return min"),
        setting="chunked_prefill",
    ),
    Rule("chunk", SourcePlace(_WHOLE, "WholePrompts.num_tokens_now", "return budget if")),
    Rule(
        "computed",
        SourcePlace(_LOOP_AHEAD, "OverlappedEngineCore._begin", "self._under_way.append"),
        overlaps=True,
    ),
    Rule("computed", SourcePlace(_LOOP, "EngineCore.step", "handle = self.runner.execute")),
    Rule("guesses", SourcePlace(_VERIFY, "_Layout.count_leading", "return (self.is_draft")),
    Rule("guesses:rejected", SourcePlace(_GUESSES, "DraftPlugin.judged", "if request_id in sent")),
    Rule(
        "discarded",
        SourcePlace(_BOOKS, "SchedulerBooks.update_from_output", "return ["),
        scheduler=_OLD,
    ),
    Rule(
        "discarded", SourcePlace(_BASE, "SchedulerBase.update_from_output", "if request.status <")
    ),
    Rule(
        "updated",
        SourcePlace(_LOOP_AHEAD, "OverlappedEngineCore._finish", "return self.scheduler.update"),
        overlaps=True,
    ),
    Rule("updated", SourcePlace(_LOOP, "EngineCore.step", "return self.scheduler.update")),
    Rule("failed", SourcePlace("common/engine.py", "LLMEngine._compute", "try")),
]

RULES = [*REQUESTS, *REASONS_TO_WAIT, *BLOCKS, *STEPS]

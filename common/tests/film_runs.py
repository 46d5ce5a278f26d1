"""Recorded runs: random workloads, and whether their frames are the engine after each step."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.events.frames import apply, empty_frame
from common.requests.tokenizer import Tokenizer
from common.tests.engine_oracle import MAX_TOKENS, Oracle, paged_runner
from request import SamplingParams
from tiered_cache import KVTierConfig
from workshop.watch.replay.film import Film

# -- a run, compared with its engine after each of its steps


@dataclass
class RecordedRun:
    path: Path
    frame: dict[str, Any] = field(default_factory=dict)  # as of the lines read so far
    broken: list[str] = field(default_factory=list)
    ends: dict[str, tuple] = field(default_factory=dict)  # by name of a member: how it ended
    num_errors: int = 0
    settings: str = ""
    is_late: bool = False  # some samples of its requests may have ended before it
    _position: int = 0

    def look(self, engine: LLMEngine) -> None:
        """Apply the lines since the last look, and note where they do not lead to the engine."""
        with self.path.open(encoding="utf-8") as file:
            file.seek(self._position)
            for line in map(json.loads, file.readlines()):
                if line.get("kind") == "run":
                    self.frame = empty_frame(line["num_blocks"])
                else:
                    self.frame = apply(self.frame, line["changes"])
            self._position = file.tell()
        if not self.broken:
            self.broken = differences(self.frame, engine)

    def end(self, output: Any) -> None:
        samples = output.outputs
        for completion in samples if output.finished else ():
            name = output.request_id
            name = name if len(samples) == 1 else f"{name}#{completion.index}"
            c = completion
            self.ends[name] = (c.token_ids, c.text, c.finish_reason, c.stop_reason)


def differences(film: dict[str, Any], engine: LLMEngine) -> list[str]:
    """Compare a frame with what the engine's own state can show: no texts, reasons and times."""
    recorder = engine.frame_recorder
    if recorder is None or recorder.is_behind:
        return []  # requests that came after the last frame are written with the next step
    recorder._cached._num_changes = -1  # read again, whatever is remembered
    now = json.loads(json.dumps(recorder.frame()))
    ended = {name for name, row in film["requests"].items() if row.get("finish")}
    unsaid = {"requests": {"prompt_pieces", "number", "order_key"}, "cached": {"by"}}
    found = []
    # An engine's own checks ask such a policy for its order, which counts as a use of the cache.
    is_asked = getattr(getattr(engine.scheduler.waiting, "policy", None), "is_cache_aware", False)
    for name in now.keys() - {"pieces", "result"} - ({"evictable"} if is_asked else set()):
        pair = film[name], now[name]
        if name in ("requests", "computed", "outputs"):
            pair = {key: value for key, value in pair[0].items() if key not in ended}, pair[1]
        if hidden := unsaid.get(name):
            pair = [{key: without(row, hidden) for key, row in rows.items()} for rows in pair]
        if name == "in_flight":
            pair = [list(plans) for plans in pair]
        if name == "loaded":  # tiers are read in another thread, after the frame too
            pair = [{t: min(n, now[name].get(t, 0)) for t, n in film[name].items()}, film[name]]
        if pair[0] != pair[1]:
            found.append(f"{name}: the film has {pair[0]}, the engine {pair[1]}")
    return found


def without(row: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def random_config(rng: random.Random, longest: int) -> dict[str, Any]:
    """Of all that the engine can be, with little memory."""
    draw = rng.choice
    scheduler, size = draw(["two_phase", "two_phase", "prefill_first", "fcfs"]), draw([1, 3, 4, 16])
    needed = -(-(longest + MAX_TOKENS) // size)
    cache = draw(["hash", "radix", "hash", "radix", None])
    config: dict[str, Any] = {"scheduler": scheduler, "block_size": size, "prefix_cache": cache}
    config["num_blocks"] = 1 + needed + draw([0, 2, needed // 2, 3 * needed])
    config["max_num_seqs"] = draw([1, 2, 4, 64])
    config["max_num_batched_tokens"] = draw([longest + MAX_TOKENS, 150, 2048])
    config["overlap_scheduling"] = rng.random() < 0.3
    config["shuffle_batch"] = rng.random() < 0.5
    config["seed"] = rng.randrange(5)
    config["chunked_prefill"] = False
    if scheduler != "fcfs":
        config["policy"] = draw(["fcfs", "priority", "lof", "random", "lpm", "dfs-weight"])
        config["chunked_prefill"] = draw([True, False, 5, 16])
        config["preempt_every"] = draw([None, None, 3, 5])
        if rng.random() < 0.3:
            method = draw(["ngram", "draft"])
            config["speculative"] = {"method": method, "num_spec_tokens": rng.randint(1, 4)}
    if scheduler == "prefill_first":
        config["mixing"] = rng.random() < 0.5
    elif config["chunked_prefill"] in (5, 16):
        config["max_long_partial_prefills"] = draw([None, 1])
    if cache is not None and rng.random() < 0.4:
        disk = draw([0, 16])
        config["kv_tiers"] = KVTierConfig(draw([4, 64]), disk)
    return config


def short_prompts(oracle: Oracle, max_len: int = 50) -> list[list[int]]:
    return [prompt for prompt in oracle.prompts if len(prompt) <= max_len]


@dataclass(repr=False)
class Workshop:
    """What runs are made of."""

    folder: Path
    loaded: Any
    draft: Any
    tokenizer: Tokenizer
    prompts: list[list[int]]
    num_runs: int = 0

    def run(self, seed: int, first_step: int = 0, **config: Any) -> RecordedRun:
        """With random settings, if none are given. Requests of all kinds come, go, and are aborted
        between steps and in the middle of them; now and then a step fails. The film begins before
        `first_step`."""
        rng = random.Random(seed)
        config = config or random_config(rng, max(map(len, self.prompts)))
        tokenizer = self.tokenizer if rng.random() < 0.8 else None
        self.num_runs += 1
        path = self.folder / f"{self.num_runs}.jsonl"
        rng = random.Random(seed)
        recorded = RecordedRun(path, settings=f"seed {seed}: {config}")
        config |= {"events": None if first_step else path, "check_invariants": True}
        models = dict(loaded=self.loaded, draft=self.draft)
        engine = LLMEngine(EngineConfig(**config), tokenizer=tokenizer, **models)
        runner = paged_runner(engine)
        num_requests = 0
        forward = runner.forward
        fails = rng.random() < 0.3
        luck = random.Random(seed)  # its own: an overlapped engine computes in another thread

        def failing_forward(batch):
            if luck.random() < 0.05:
                raise RuntimeError("no memory")
            return forward(batch)

        if fails:
            runner.forward = failing_forward

        def on_step(record) -> None:
            if rng.random() < 0.05 and engine._groups:
                engine.abort_request(rng.choice(sorted(engine._groups)))

        def add_one() -> None:
            nonlocal num_requests
            params = SamplingParams(
                n=rng.choice([1, 1, 1, 2]),
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.randrange(100),
                max_tokens=rng.randint(1, MAX_TOKENS),
                stop=rng.choice([(), (), ("E", "v2"), ("z",)]) if tokenizer else (),
                stop_token_ids=rng.choice([(), (), (1, 5, 9, 14, 20, 30, 40)]),
            )
            name = rng.choice("abcdefgh") if rng.random() < 0.3 else f"r{num_requests}"
            num_requests += 1
            if name in engine._groups:
                return
            salt = rng.choice([None, None, "mine"])
            prompt = rng.choice(self.prompts)
            try:
                how = {"priority": rng.randint(0, 3), "cache_salt": salt}
                engine.add_request(name, prompt, params, **how)
            except ValueError:
                assert name not in engine._groups  # it would never have fitted

        engine.on_step = on_step
        num_coming = rng.randint(3, 12)
        for step in range(400):
            if 0 < step == first_step:
                recorded = RecordedRun(path, settings=recorded.settings, is_late=True)
                engine.watch(path)
                recorded.look(engine)
            if num_requests < num_coming and rng.random() < 0.5:
                add_one()
            if rng.random() < 0.03 and engine._groups:
                recorded.end(engine.abort_request(rng.choice(sorted(engine._groups))))
            if rng.random() < 0.02:
                engine.reset_prefix_cache()
            if num_requests >= num_coming and not engine.has_unfinished_requests():
                break
            try:
                outputs = engine.step()
            except RuntimeError:
                recorded.num_errors += 1
                outputs = []
            if step >= first_step:
                recorded.look(engine)
            for output in outputs:
                recorded.end(output)
        else:
            raise AssertionError(f"{recorded.settings}: it does not end")
        runner.forward = forward
        try:
            engine.close()
        except RuntimeError:  # a step that was under way, and of nobody
            recorded.num_errors += 1
        else:
            recorded.look(engine)
        return recorded


def check_film(recorded: RecordedRun) -> None:
    assert not recorded.broken, (str(recorded.broken)[:3000], recorded.settings)
    film = Film.read(recorded.path)
    requests = film.requests()
    for name, end in recorded.ends.items():
        if recorded.is_late and name not in requests:
            continue
        row = requests[name]
        finish = row["finish"]
        reached = (row["outputs"], row["text"], finish["reason"], finish["stop_reason"])
        assert reached == end, (name, recorded.settings)
    failed = [line for line in film.lines if line["at"] == "failed"]
    assert len(failed) == recorded.num_errors, [line["changes"]["result"] for line in failed]

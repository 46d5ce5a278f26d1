"""READING_ALONG.zh.md says what runs: its code, its tables, its classes and calls, its errata.

Readers of the Chinese posts read it, so there is no English page of it."""

from __future__ import annotations

import re
from code import InteractiveConsole
from collections.abc import Iterator
from dataclasses import make_dataclass

import pytest
import torch

from common.events.step_trace import batch_line
from common.llm import LLM, SamplingParams
from draft_plugin import DraftPlugin
from fcfs_scheduler import FCFSScheduler
from input_batch import InputBatch
from paged_attention import AttentionMetadata, paged_attention, write_kv
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request, RequestStatus
from scheduler import Scheduler
from scheduler_interface import StepOutput
from workshop.book.quoted import unfilled
from workshop.book.translation import ROOT, Section, sections_of
from workshop.book.worked_steps import worked_table

PAGE = ROOT / "READING_ALONG.zh.md"
TEXT = PAGE.read_text(encoding="utf-8")
SECTIONS = sections_of(PAGE)
BLOCKS = [
    (section, code) for section in SECTIONS for info, code in section.code() if info == "python"
]
# `file.py`<br>[`::name`](room/file.py); [`test_name`](room/test_file.py)
PLACE = re.compile(r"`(\w+\.py)`(?:<br>| )\[`::([\w.]+)`\]\(([\w/]+\.py)\)")
TEST = re.compile(r"\[`(test_\w+)`\]\(([\w/]+\.py)\)")
# or a case of a step log, [`plans.txt::a title`](04_scheduler/plans.txt)
ROW = re.compile(r"\[`\w+\.txt::[^`]+`\]\([\w/]+\.txt\)")
ERRATUM = re.compile(r"(?<![A-Za-z0-9])([A-E]\d+)(?![A-Za-z0-9])")


def section(title: str) -> Section:
    (found,) = (s for s in SECTIONS if s.title == title)
    return found


def rows(title: str) -> Iterator[list[str]]:
    """The cells of the tables of a section, heads left out."""
    for line in section(title).source.splitlines():
        if line.startswith("| ") and not line.startswith(("| 文章中 |", "| 文章说 |")):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


# -- typed from the posts


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=lambda n: f"{n}-{BLOCKS[n][0].anchor}")
def test_what_is_to_be_typed_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As `python` takes what is pasted into it: a block ends with an empty line."""
    console = InteractiveConsole({"__name__": "typed"})
    for line in [*BLOCKS[number][1].splitlines(), ""]:
        console.push(line)
    assert "Error" not in capsys.readouterr().err


# -- the errata


ERRATA = {  # | **A1** what the post says | what is right |
    (words := said.split("**"))[1]: (words[2], right)
    for title in ("A 和 B", "C", "D", "E")
    for said, right in rows(f"文章 {title} 的勘误")
}


def test_errata_are_numbered_and_each_names_a_function_and_a_test() -> None:
    """The site adds the lines that the links lead to, and misses what is not there."""
    numbers = [f"{post}{n}" for post in "ACDE" for n in range(1, 99)]
    assert list(ERRATA) == [name for name in numbers if name in ERRATA]
    counts = [sum(name[0] == post for name in ERRATA) for post in "ACDE"]
    assert min(counts) >= 8 and {f"{p}{n}" for p, n in zip("ACDE", counts)} <= ERRATA.keys()
    assert set(ERRATUM.findall(TEXT)) <= ERRATA.keys(), "is referred to"
    for name, (said, right) in ERRATA.items():
        worked_out, file, symbol, test = right.split("<br>")
        assert said.strip() and worked_out, name
        assert PLACE.fullmatch(f"{file}<br>{symbol}"), name
        assert TEST.fullmatch(test) or ROW.fullmatch(test), name
    assert len(PLACE.findall(TEXT)) == TEXT.count("`::") > 200
    assert not list(unfilled(TEXT, ROOT))


# -- rules of the posts in miniature, beside this engine's


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", dtype="float64", compile=False, num_threads=1)


def test_a_queue_that_is_only_read_is_chosen_from_twice() -> None:
    """D12: requests that were chosen have to leave the queue."""
    waiting = ["a", "b"]
    chosen = [list(waiting) for _ in range(2)]  # the post reads, and removes none
    assert chosen == [["a", "b"], ["a", "b"]]
    scheduler = PrefillFirstScheduler(8, 64, 100)
    for name in waiting:
        scheduler.add_request(Request.from_tokens(name, [1, 2, 3], max_new_tokens=9))
    plans = [scheduler.schedule()]
    scheduler.update_from_output(plans[0], StepOutput({"a": [7], "b": [7]}))
    plans.append(scheduler.schedule())
    assert [plan.num_scheduled_tokens for plan in plans] == [{"a": 3, "b": 3}, {"a": 1, "b": 1}]


def test_a_token_budget_bounds_a_step_and_not_the_memory() -> None:
    """A13."""
    scheduler = FCFSScheduler(max_num_seqs=4, max_num_batched_tokens=8)
    for name in "abcd":
        scheduler.add_request(Request.from_tokens(name, [1, 2], max_new_tokens=30))
    for _ in range(20):
        plan = scheduler.schedule()
        assert plan.total_num_scheduled_tokens <= 8
        scheduler.update_from_output(plan, StepOutput({name: [7] for name in "abcd"}))
    assert sum(r.num_computed_tokens for r in scheduler.running.values()) == 4 * 21


def test_an_end_that_is_asked_for_with_equality_and_not_after_a_prefill_is_missed() -> None:
    """C16, as in the flow charts: a prefill appends, a decode appends and asks."""

    def post(max_tokens: int, tokens: list[int], eos: int = 2) -> int | None:
        outputs = tokens[:1]
        for token in tokens[1:]:
            outputs.append(token)
            if token == eos or len(outputs) == max_tokens:
                return len(outputs)
        return None  # it goes on

    def ours(max_tokens: int, tokens: list[int]) -> int:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        request = Request("a", [1], params, eos_token_ids=[2])
        while not request.is_finished:
            request.append_output_token(tokens[request.num_output_tokens])
        return request.num_output_tokens

    assert (post(1, [7] * 50), ours(1, [7] * 50)) == (None, 1)
    assert (post(9, [2, *[7] * 50]), ours(9, [2, *[7] * 50])) == (9, 1)


def test_an_answer_is_the_completion_without_its_prompt(llm: LLM) -> None:
    """C19."""
    params = SamplingParams(temperature=0, max_tokens=8)
    (output,) = llm.generate(["def add(a, b):"], params, use_tqdm=False)
    token_ids = output.outputs[0].token_ids
    decode = llm.engine.tokenizer.decode
    assert output.outputs[0].text == decode(token_ids)
    by_post = decode([*output.prompt_token_ids, *token_ids])
    assert by_post.startswith("def add(a, b):") and by_post != output.outputs[0].text


def test_keys_that_are_stored_after_attention_are_missing_from_it() -> None:
    """C21: a decode at position 1, in the slot of which stands nothing yet."""
    key = torch.tensor([1.0, 2.0]).view(2, 1, 1)
    where = torch.tensor([0, 1])
    caches = torch.zeros(1, 4, 1, 1), torch.zeros(1, 4, 1, 1)
    write_kv(key[:1], key[:1], *caches, where[:1])
    metadata = AttentionMetadata(where, where[1:] + 1, where[:1].view(1, 1), where[1:], 1, 2)
    late = paged_attention(torch.ones(1, 1, 1), *caches, metadata, 1.0)
    write_kv(key[1:], key[1:], *caches, where[1:])
    right = paged_attention(torch.ones(1, 1, 1), *caches, metadata, 1.0)
    weights = torch.softmax(torch.tensor([1.0, 2.0]), 0)
    assert right.item() == pytest.approx((weights @ torch.tensor([1.0, 2.0])).item())
    assert late.item() == pytest.approx(torch.softmax(torch.tensor([1.0, 0.0]), 0)[0].item())


def test_a_running_batch_that_was_mixed_and_not_emptied_is_merged_again() -> None:
    """D15: MIXED counts as extend, so the next call merges what it has mixed."""

    def post(prompts: list[str], empties: bool) -> list[list[str]]:
        running, last, batches = [], [], []
        for prompt in prompts:
            running = running + last
            last = [prompt, *running]
            running = [] if empties else running
            batches.append(last)
        return batches

    assert post(["a", "b", "c"], empties=False)[-1] == ["c", "a", "b", "a"]
    assert post(["a", "b", "c"], empties=True)[-1] == ["c", "b", "a"]
    scheduler = PrefillFirstScheduler(8, 64, 100, mixing=True)
    for name in "abc":
        scheduler.add_request(Request.from_tokens(name, [1, 2, 3], max_new_tokens=9))
        plan = scheduler.schedule()
        scheduler.update_from_output(plan, StepOutput({n: [7] for n in plan.num_scheduled_tokens}))
        scheduler.check_invariants()  # nobody is in two batches
    assert sorted(r.request_id for r in scheduler.last_batch.reqs) == ["a", "b", "c"]


def test_outputs_to_come_are_memory_and_are_reserved_whole() -> None:
    """D16: a prompt of 100 that may generate 1,000, in steps of 512 over 1,600 positions."""
    assert 100 + 1000 * 0.7 > 512  # the post never takes it
    assert 2 * (100 + 1000 * 0.7) <= 1600 < 2 * (100 + 1000)  # and of the memory it would take two
    scheduler = PrefillFirstScheduler(8, 512, 100, max_consecutive_prefills=None)
    for name in "ab":
        prompt = [ord(name)] * 100
        scheduler.add_request(Request.from_tokens(name, prompt, max_new_tokens=1000))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 100}


def test_the_line_of_a_batch_counts_what_was_computed_and_what_was_found() -> None:
    """D22, and D4: by the post, a prompt of 36 tokens of which 32 are found has 36 new ones."""
    llm = LLM(device="cpu", block_size=16, policy="fcfs", compile=False, num_threads=1)
    lines: list[str] = []
    llm.engine.on_step = lambda record: lines.append(batch_line(record))
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    prompt = list(range(40, 72))
    llm.generate([[*prompt, 7]], params, use_tqdm=False)
    llm.engine.add_request("b", [*prompt, 8, 9, 10, 11], params)
    llm.engine.step()
    llm.engine.add_request("c", [5, 6], params)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    cold, warm = (
        f"Prefill batch. #new-seq: 1, #new-token: {new}, #cached-token: {cached}, "
        f"cache-hit-rate: {rate}, #running-req: 0, #queue-req: 0"
        for new, cached, rate in ((33, 0, "0.00"), (4, 32, "0.89"))
    )
    decode = "Decode batch. #running-req: 1, #queue-req: 0"
    mixed = cold.replace("33", "2").replace("running-req: 0", "running-req: 1")
    assert lines == [cold, decode, decode, warm, mixed, decode.replace("1", "2"), decode]


class PostScheduler:
    """What matters here of post E's, 8.3: one block for 16 tokens, two blocks, two lists."""

    def __init__(self) -> None:
        self.waiting, self.running, self.requests = [], [], {}
        self.held = dict.fromkeys("ab", 0)
        self.status = dict.fromkeys("ab", "waiting")

    def fits(self, name: str, num_tokens: int) -> bool:
        num_new = -(-num_tokens // 16) - self.held[name]
        if sum(self.held.values()) + num_new > 2:
            return False
        self.held[name] += num_new
        return True

    def schedule(self, num_tokens: int) -> None:
        still_running = []
        for name in self.running:
            if not self.fits(name, num_tokens):  # the victim is the current one
                self.running.remove(name)
                self.held[name] = 0
                self.waiting.append(name)
            still_running.append(name)
        self.running = still_running
        self.running += [name for name in self.waiting if self.fits(name, 16)]
        self.waiting = [name for name in self.waiting if name not in self.running]


def test_who_preempts_itself_is_admitted_in_the_same_step_and_another_is_lost() -> None:
    """E29: two requests of 16 tokens in two blocks; both want a token more."""
    post = PostScheduler()
    post.waiting = ["a", "b"]
    post.schedule(16)
    assert post.running == ["a", "b"]
    post.schedule(17)
    assert (post.running, post.waiting) == (["a", "a"], [])
    scheduler = Scheduler(num_gpu_blocks=3, watermark=0.0)  # one is the null block
    for name in "ab":
        scheduler.add_request(Request.from_tokens(name, [ord(name)] * 16, max_new_tokens=9))
    scheduler.update_from_output(scheduler.schedule(), StepOutput({"a": [7], "b": [7]}))
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 1}
    assert list(scheduler.running) == ["a"] and [r.request_id for r in scheduler.waiting] == ["b"]


def test_an_abort_of_who_has_ended_changes_nothing() -> None:
    """E30: the post keeps who has ended in a dict, and `abort_request` writes its status first."""
    requests = {"a": "FINISHED_LENGTH_CAPPED"}
    if requests.get("a") is not None:
        requests["a"] = "FINISHED_ABORTED"
    assert requests == {"a": "FINISHED_ABORTED"}
    scheduler = Scheduler(num_gpu_blocks=4)
    request = Request.from_tokens("a", [1, 2], max_new_tokens=1)
    scheduler.add_request(request)
    scheduler.update_from_output(scheduler.schedule(), StepOutput({"a": [7]}))
    scheduler.abort_request("a")
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    scheduler.add_request(Request.from_tokens("a", [1, 2]))  # the name is free


def test_drafts_are_fed_after_the_last_token_and_its_own_token_is_not_accepted() -> None:
    """E28, E32: five drafts, of which two are right."""
    plugin = DraftPlugin()
    scheduler = Scheduler(num_gpu_blocks=4, plugins=[plugin])
    request = Request.from_tokens("a", [1, 2, 3], max_new_tokens=20)
    scheduler.add_request(request)
    drafts = {"a": [5, 6, 7, 8, 9]}
    scheduler.update_from_output(
        scheduler.schedule(), StepOutput({"a": [4]}, draft_token_ids=drafts)
    )
    plan = scheduler.schedule()
    assert plan.start_positions == [3] and plan.num_scheduled_tokens == {"a": 1 + 5}
    accepted_tokens = [5, 6, 40]  # the third is the target's own
    scheduler.update_from_output(plan, StepOutput({"a": accepted_tokens}))
    assert plugin.num_rejected_drafts == 5 - (len(accepted_tokens) - 1) == 3
    assert request.num_tokens - request.num_computed_tokens == 1
    by_post = 3 + 1 + 5 - (5 - len(accepted_tokens))
    assert request.num_tokens - by_post == 0  # nothing is left to compute


def test_what_a_post_leaves_out_is_an_error(llm: LLM) -> None:
    """A12, A15, E31: a field of the diagram, a name in `generate_batch`, an answer of two parts."""
    fields = ["req_ids", "token_ids", "start_positions", "is_prefill", "prompt_lens"]
    batch = make_dataclass("InputBatch", fields)(*([[]] * 5))
    with pytest.raises(AttributeError, match="batch_size"):
        _ = batch.batch_size
    assert InputBatch(["a"], [[1]], [0], [True], [1]).batch_size == 1
    with pytest.raises(NameError, match="req_id"):
        eval("[(prompt, req_id) for prompt in prompts]", {"prompts": ["a"]})
    params = SamplingParams(temperature=0, max_tokens=1)
    assert len(llm.engine.generate_batch(["a", "b"], params)) == 2
    with pytest.raises(TypeError, match="unpack"):
        _delay_free_blocks, _params = (lambda request, blocks: None)("a", [1])


def test_the_table_of_three_steps_is_what_the_engine_does() -> None:
    ((_, block),) = section("三个请求，三步迭代").code()
    assert block == f"{worked_table()}\n", "run: python -m workshop.worked_steps"

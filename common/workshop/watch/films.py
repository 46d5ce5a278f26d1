"""One film a chapter: a real run, or two, in which the chapter's idea can be seen happening.

    shot = shoot(FILMS[3], folder)        perform its scripts, and read what they show
    page_of(shot)                         the watch page, with its caption and where to look

A caption names steps, requests and blocks that are read from the events of the very film it stands
above (`film_facts.py`). A film that does not show its point has no caption: `NotShown`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.workshop.replay.film import Film
from common.workshop.watch import film_facts, film_scripts
from common.workshop.watch.film_facts import Facts
from common.workshop.watch.page_maker import Reel, make_page
from common.workshop.watch.workloads import Cast, Script, load_cast, perform

Both = tuple[str, str]  # in English, in Chinese


@dataclass(frozen=True, slots=True)
class Moment:
    """A step to look at. `step` is the name of a fact; so are the names in braces."""

    step: str
    words: Both
    request: str | None = None  # whom to select there, the name of a fact
    still: tuple[tuple[str, int], ...] = ()  # scenes of the still picture, and how high they are


@dataclass(frozen=True, slots=True)
class ChapterFilm:
    """Of a chapter: its scripts, and what is said of them. `labels` tell two runs apart."""

    chapter: int
    folder: str
    title: Both
    scripts: tuple[Script, ...]
    facts: Callable[..., Facts]
    caption: Both
    moments: tuple[Moment, ...]
    labels: tuple[Both, ...] = (("run", "运行"),)
    note: Both = ("", "")  # what it does not show


@dataclass(frozen=True, slots=True)
class Shot:
    """A chapter's film, made."""

    film: ChapterFilm
    paths: tuple[Path, ...]
    facts: Facts

    @property
    def caption(self) -> Both:
        return self.say(self.film.caption)

    def say(self, words: Both) -> Both:
        english, chinese = (text.format(**self.facts) for text in words)
        return english, chinese

    def step(self, moment: Moment) -> int:
        return int(self.facts[moment.step])

    def address(self, moment: Moment) -> str:
        """Where the page shows it."""
        name = "" if moment.request is None else f"&request={self.facts[moment.request]}"
        return f"step={self.step(moment)}{name}"


def shoot(film: ChapterFilm, folder: Path, cast: Cast | None = None) -> Shot:
    """Perform its scripts, into `folder`. Raises `NotShown`."""
    cast = cast or load_cast()
    names = "ab" if len(film.scripts) > 1 else ("",)
    paths = tuple(folder / f"film_{film.chapter}{name}.jsonl" for name in names)
    for script, path in zip(film.scripts, paths):
        perform(script, path, cast)
    return Shot(film, paths, film.facts(*map(Film.read, paths)))


def page_of(shot: Shot, language: int | None = None) -> str:
    """The watch page of it, as text. It opens at the first moment. `language` is that of the labels
    of two runs: 0 is English, 1 Chinese, None both."""
    film = shot.film
    labels = [" · ".join(both) if language is None else both[language] for both in film.labels]
    reels = [
        Reel(label, path.read_text(encoding="utf-8")) for label, path in zip(labels, shot.paths)
    ]
    moments = [
        {
            "address": shot.address(moment),
            "step": shot.step(moment),
            "request": shot.facts[moment.request] if moment.request else None,
            "words": shot.say(moment.words),
        }
        for moment in film.moments
    ]
    about = {"caption": shot.caption, "note": film.note, "moments": moments}
    settings: dict[str, Any] = {"film": about}
    english, chinese = film.title
    title = (f"Chapter {film.chapter}: {english}", f"第 {film.chapter} 章：{chinese}")
    return make_page(reels, title, shot.address(film.moments[0]), **settings)


_ALL = (
    ChapterFilm(
        chapter=1,
        folder="01_batching",
        title=("a static batch, and a continuous one", "静态批处理与连续批处理"),
        scripts=(film_scripts.STATIC, film_scripts.CONTINUOUS),
        labels=(("static", "静态"), ("continuous", "连续")),
        facts=film_facts.static_and_continuous,
        caption=(
            "{num_requests} requests, {num_seats} seats (max_num_seqs). {ended} ends in step "
            "{end}. In the static batch its seat stays empty until {longest}, the longest, has "
            "ended too: {newcomer} begins in step {late}. In the continuous batch {newcomer} "
            "begins in step {joined}, and all is over after {continuous_steps} steps instead of "
            "{static_steps}.",
            "{num_requests} 个请求，至多 {num_seats} 个同时运行（max_num_seqs）。{ended} 在第 "
            "{end} 步结束。静态批处理中，它的位置一直空着，要等最长的 {longest} 也结束，"
            "{newcomer} 到第 {late} 步才开始。连续批处理中，{newcomer} 在第 {joined} 步就开始，"
            "全部只用 {continuous_steps} 步，而不是 {static_steps} 步。",
        ),
        note=(
            "The static run is this engine with one rule more: nobody joins those who run (“held "
            "back” in the picture). Rows of requests that have ended are not computed here; a "
            "padded batch computes them too.",
            "静态的一边是同一个引擎加上一条规则：有请求在运行时，谁也不能加入（图中的“受限”）。已结束"
            "请求的行在这里不再计算；补齐的批处理连它们也要计算。",
        ),
        moments=(
            Moment(
                "joined",
                (
                    "a seat is free; static: nobody may join, continuous: {newcomer} joins",
                    "空出一个位置；静态：谁也不能加入，连续：{newcomer} 加入",
                ),
                "newcomer",
                (("grid", 252),),
            ),
            Moment(
                "late",
                (
                    "the static batch is over at last, and {newcomer} begins",
                    "静态的一批终于结束，{newcomer} 开始",
                ),
                "newcomer",
            ),
        ),
    ),
    ChapterFilm(
        chapter=2,
        folder="02_paged_kv",
        title=("two block tables that grow", "两张增长中的块表"),
        scripts=(film_scripts.TABLES,),
        facts=film_facts.growing_tables,
        caption=(
            "{a} and {b} take a block of {block_size} tokens whenever their last one is full, so "
            "their blocks lie between each other: in step {step} the table of {a} is [{table_a}], "
            "that of {b} [{table_b}]. Block {block}, which {taker} takes in this step, was {c}'s "
            "until step {gone}: any free block will do.",
            "{a} 和 {b} 的最后一个块（{block_size} 个 token）一满，就各取一个新块，所以两者的块互"
            "相穿插：第 {step} 步时 {a} 的块表是 [{table_a}]，{b} 的是 [{table_b}]。{taker} 这一步"
            "取到的块 {block} 在第 {gone} 步之前属于 {c}：任何空闲块都可以用。",
        ),
        moments=(
            Moment(
                "step",
                (
                    "the blocks of {a} and {b} lie between each other; {taker} takes block {block}",
                    "{a} 与 {b} 的块互相穿插；{taker} 取走块 {block}",
                ),
                None,
                (("grid", 175), ("pool", 165)),
            ),
            Moment("step", ("the block table of {a}", "{a} 的块表"), "a"),
            Moment(
                "gone",
                ("{c} ends, and its blocks are free again", "{c} 结束，它的块重新空闲"),
                "c",
            ),
        ),
    ),
    ChapterFilm(
        chapter=3,
        folder="03_prefix_cache",
        title=("a shared beginning, a split, an eviction", "共享前缀、节点拆分与淘汰"),
        scripts=(film_scripts.PREFIXES,),
        facts=film_facts.shared_prefix,
        caption=(
            "{b} begins like {a}. In step {step} it finds {num_trunk} blocks of {a} in the cache "
            "and computes {num_computed} tokens instead of {num_prompt}; behind block {last} the "
            "two differ, and there the node is split. When memory runs short, the end that only "
            "{a} had is evicted, {gone}. The shared blocks stay, and {c} finds all {num_trunk} in "
            "step {back}.",
            "{b} 的开头和 {a} 一样。第 {step} 步，它在缓存里找到 {a} 的 {num_trunk} 个块，只需计算 "
            "{num_computed} 个 token，而不是 {num_prompt} 个；两者在块 {last} 之后不同，节点就在"
            "那里拆分。内存不够时，被淘汰的是只属于 {a} 的末尾：{gone_zh}。共享的块留了下来，{c} "
            "在第 {back} 步找到全部 {num_trunk} 个。",
        ),
        moments=(
            Moment(
                "step",
                (
                    "{b} finds {num_trunk} blocks; the node is split in front of block {cut}",
                    "{b} 找到 {num_trunk} 个块；节点在块 {cut} 之前拆分",
                ),
                "b",
                (("cache", 255),),
            ),
            Moment(
                "late",
                (
                    "the last block that only {a} had is evicted, the shared ones stay",
                    "只属于 {a} 的最后一个块被淘汰，共享的块留下",
                ),
                None,
                (("cache", 320),),
            ),
            Moment(
                "back",
                ("{c} finds the shared {num_trunk} blocks", "{c} 找到共享的 {num_trunk} 个块"),
                "c",
            ),
        ),
    ),
    ChapterFilm(
        chapter=4,
        folder="04_scheduler",
        title=("memory runs out: preemption and return", "内存用完：抢占与恢复"),
        scripts=(film_scripts.SCARCE,),
        facts=film_facts.preemption_and_return,
        caption=(
            "In step {step} all {num_all} blocks are taken and {taker} needs one more. {victim}, "
            "which was admitted last, is preempted: its {num_blocks} blocks are freed, its tokens "
            "are kept. It waits {num_waited} steps. In step {late} it returns, computes the "
            "{num_lost} lost tokens again in one go, and goes on where it was.",
            "第 {step} 步，{num_all} 个块全部用完，而 {taker} 还要一个。最后进入的 {victim} 被"
            "抢占：它的 {num_blocks} 个块被释放，token 保留。它等了 {num_waited} 步，第 {late} 步"
            "恢复运行，一次重算丢失的 {num_lost} 个 token，然后从原处继续。",
        ),
        moments=(
            Moment(
                "step",
                (
                    "no block is free: {victim} gives up its own for {taker}",
                    "没有空闲块：{victim} 让出自己的块给 {taker}",
                ),
                None,
                (("grid", 175), ("pool", 142)),
            ),
            Moment(
                "late",
                (
                    "{victim} returns, and computes {num_lost} tokens again",
                    "{victim} 恢复，重算 {num_lost} 个 token",
                ),
                "victim",
            ),
        ),
    ),
    ChapterFilm(
        chapter=5,
        folder="05_spec_decode",
        title=("guesses, right and wrong", "猜对与猜错"),
        scripts=(film_scripts.PLAIN, film_scripts.GUESSING),
        labels=(("without guesses", "不猜"), ("with guesses", "猜")),
        facts=film_facts.guesses,
        caption=(
            "The same requests without guesses and with: every token is the same. In step {step} "
            "all guesses for {right} are right, and it gains {num_gained} tokens at once. All "
            "{num_wrong} for {wrong} are wrong: they are thrown away, and it gains one token, as "
            "without them. {guessing_steps} steps do the work of {plain_steps}.",
            "同样的请求，不猜与猜：每个 token 都相同。第 {step} 步，{right} 的猜测全对，一步得到 "
            "{num_gained} 个 token；{wrong} 的 {num_wrong} 个全错：丢掉它们，得到一个 token，和不"
            "猜时一样。{guessing_steps} 步做完了 {plain_steps} 步的工作。",
        ),
        moments=(
            Moment(
                "step",
                (
                    "right guesses for {right}, wrong ones for {wrong}",
                    "{right} 的猜测对了，{wrong} 的错了",
                ),
                None,
                (
                    ("grid", 222),
                    ("words", 185),
                ),
            ),
        ),
    ),
    ChapterFilm(
        chapter=6,
        folder="06_chunked_prefill",
        title=("a long prompt, whole and in pieces", "长提示词：整段与分块"),
        scripts=(film_scripts.WHOLE, film_scripts.PIECES),
        labels=(("whole", "整段"), ("in pieces", "分块")),
        facts=film_facts.long_prompt,
        caption=(
            "{name} comes with {num_prompt} tokens in step {step}. Whole, they are one step of "
            "{num_whole} tokens, and {others} get their next token when all of it is computed. In "
            "pieces of {size} they are {num_pieces} steps of at most {num_most} tokens, and "
            "{others} get a token in each. The price: {name} has its own first token in step "
            "{last} instead of {step}.",
            "{name} 在第 {step} 步带着 {num_prompt} 个 token 到来。整段计算时，这一步有 "
            "{num_whole} 个 token，{others_zh} 要等它全部算完才有下一个 token。按 {size} 分块，变"
            "成 {num_pieces} 步，每步至多 {num_most} 个 token，{others_zh} 每步都有新 token。代价："
            "{name} 的第一个 token 在第 {last} 步才出现，而不是第 {step} 步。",
        ),
        moments=(
            Moment(
                "step",
                (
                    "{name} computes {num_prompt} tokens at once, or a piece of {size}",
                    "{name} 一次算 {num_prompt} 个 token，或只算一块 {size} 个",
                ),
                "name",
                (
                    ("grid", 205),
                    ("queue", 110),
                ),
            ),
            Moment(
                "last",
                ("the last piece: {name} has its first token", "最后一块：{name} 有了第一个 token"),
                "name",
            ),
        ),
    ),
)
FILMS = {film.chapter: film for film in _ALL}
